"""What the docs point to is there: links, commands with their options, settings, files."""

import re
import sys
from pathlib import Path

from launch import run

from canal_mpi import config
from canal_mpi.cli import cli
from canal_mpi.settings import Job

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("hostfiles/*.md")]
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it names what is gone too
SCRIPTS = [*ROOT.glob("jobs/*.sbatch"), *ROOT.glob("jobs/*.pbs")]
LINK = re.compile(r"\]\(([^)\s#]+)")
COMMAND = re.compile(r"canal-mpi ([a-z]+)((?: (?!canal-mpi)[^\s`#|;&]+)*)")
FOLDERS = "canal_mpi|benchmarks|tools|tests|jobs|hostfiles|docs"
FILE = re.compile(rf"(?<![\w/])(?:{FOLDERS})/[a-z][\w/-]*(?:\.\w+)?")
PACKAGES = "agent|membuf|learn|topology|envs|rank|results|launch|report|experiments"
MODULE = re.compile(rf"`(?:canal_mpi/)?((?:{PACKAGES})/\w+)(?:\.py)?`")
SETTING = re.compile(r"--set\s+([a-z_]+\.[a-z_]+)=|`([a-z_]+\.[a-z_]+)(?:\s?=\s?[^`]+)?`")
MOST_LINES = {"README.md": 110, "ARCHITECTURE.md": 150, "CONTRIBUTING.md": 80}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_links_and_pictures_are_there() -> None:
    for page in PAGES:
        links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
        missing = [link for link in links if not (page.parent / link).exists()]
        assert missing == [], name_of(page)
    assert any(LINK.search(page.read_text()) for page in PAGES)


def test_commands_and_their_options_exist() -> None:
    seen = 0
    for page in [*CURRENT, *SCRIPTS]:
        for name, rest in COMMAND.findall(page.read_text()):
            if name not in cli.commands:
                assert not rest.lstrip().startswith("-"), f"{name_of(page)}: canal-mpi {name}{rest}"
                continue
            inner = rest.partition(" -- train")
            for command, words in ((name, inner[0]), ("train", inner[2])):
                known = {o for p in cli.commands[command].params for o in p.opts} | {"--help"}
                given = re.findall(r"(?<!\S)--[a-z][a-z-]+", words)
                assert set(given) <= known, f"{name_of(page)}: canal-mpi {name}{rest}"
                seen += len(given)
    assert seen > 50


def test_settings_exist() -> None:
    sections = {line[1:-1] for line in config.to_toml(Job()).splitlines() if line.startswith("[")}
    seen = 0
    for page in CURRENT:
        for found in SETTING.findall(page.read_text()):
            section, key = (found[0] or found[1]).split(".")
            if section in sections and key != "py":
                assert hasattr(getattr(Job(), section), key), f"{name_of(page)}: {section}.{key}"
                seen += 1
    assert seen > 20


def test_files_and_modules_exist() -> None:
    for page in CURRENT:
        text = page.read_text()
        for path in FILE.findall(text):
            there = (ROOT / path).exists() or path == "docs/study/"  # that of an older commit
            assert there, f"{name_of(page)}: {path}"
        for module in MODULE.findall(text):
            path = ROOT / "canal_mpi" / module
            assert path.with_suffix(".py").exists() or path.is_dir(), f"{name_of(page)}: {module}"


def test_the_first_pages_are_short() -> None:
    for name, most in MOST_LINES.items():
        assert len((ROOT / name).read_text().splitlines()) <= most, name


def test_the_tables_of_the_learner_are_those_of_its_runs() -> None:
    done = run([sys.executable, str(ROOT / "tools" / "scores"), "--print"])
    assert done.code == 0, done.err
    assert done.out.strip() in (ROOT / "docs" / "results.md").read_text()
