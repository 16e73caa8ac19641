"""tools/recording: a command in a terminal as an animated SVG."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from launch import ROOT, run

pytest.importorskip("pyte", reason="pyte is not installed (extra: look)")
TOOL = [sys.executable, str(ROOT / "tools" / "recording"), "--interval", "0.01"]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_command_is_recorded_with_its_screens_in_order_and_in_colour(tmp_path: Path) -> None:
    film = tmp_path / "film.svg"
    script = r"printf 'one <\n'; sleep 0.3; printf '\033[2J\033[H\033[32mtwo\033[0m\n'; sleep 0.2"
    done = run([*TOOL, str(film), "sh", "-c", script], timeout=60)
    assert done.code == 0, done.err
    page = ElementTree.parse(film).getroot()
    lines = {line.get("id"): "".join(line.itertext()) for line in page.iter(f"{SVG}text")}
    screens = [
        [lines[use.get("href", "").removeprefix("#")] for use in screen.iter(f"{SVG}use")]
        for screen in page.iter(f"{SVG}g")
        if screen.get("transform")
    ]
    assert screens[0][0].startswith("$ sh -c")
    assert any("one <" in screen for screen in screens)
    assert screens[-1] == ["two"]
    assert 'fill="#7ee787">two' in film.read_text()


def test_a_command_that_fails_leaves_no_film(tmp_path: Path) -> None:
    film = tmp_path / "film.svg"
    done = run([*TOOL, str(film), "sh", "-c", "exit 3"], timeout=60)
    assert done.code == 1 and "sh ended with 3" in done.err
    assert not film.exists()
