"""Where each setting of a job comes from, TOML in and out, and settings that differ per host.

Precedence: flag > environment variable CANAL_… > job file > preset > default. Rules for hosts are
`[hosts."nano-*"]` with `device`, `threads`, `envs`, `speed`: of several rules that match, the first
one that has a setting decides, so specific rules come before general ones.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from canal_mpi.errors import UsageError, check_name, suggestion
from canal_mpi.settings import EXPANSIONS, PRESETS, Job, Layer
from canal_mpi.topology.graphs import parse_topology

# A host's setting, and the setting of the job that it replaces there.
HOST_KEYS = {
    "device": "learn.device",
    "threads": "learn.threads",
    "envs": "train.num_envs",
    "speed": "train.speed",
}
PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,253}")
EXAMPLE = 'hosts.PATTERN.SETTING, as in [hosts."nano-*"] with threads = 4'
LONGEST_JOB = 1 << 20  # bytes of a job file
MOST_DOTS = 1000  # in one of its lines: keys of so many parts take minutes to parse
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@cache
def keys() -> Mapping[str, Any]:
    """Every dotted key of the job with its field and type; `hosts` has rules instead."""
    return dict(_walk(Job, ""))


def _walk(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(cls)
    for part in fields(cls):
        if part.name == "hosts":
            continue
        if is_dataclass(hints[part.name]):
            yield from _walk(hints[part.name], f"{prefix}{part.name}.")
        else:
            yield f"{prefix}{part.name}", (part, hints[part.name])


def resolve(
    flags: Layer | None = None,
    job_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """The job that flags, environment and files make together, checked."""
    layers = [_from_environment(os.environ if environ is None else environ), flags or {}]
    if job_file is not None:
        path = find_job(job_file)
        layers.insert(0, {"name": path.stem} | read_toml(_bytes_of(path), str(path)))
    preset = next((str(x["preset"]) for x in reversed(layers) if "preset" in x), "")
    check_name("preset", preset, PRESETS, outside=False)
    values: Layer = {}
    for layer in [dict(PRESETS.get(preset, {})), *layers]:
        values |= _on_top(values, layer)
    return build(values)


def _on_top(values: Layer, layer: Layer) -> Layer:
    """A layer, checked, with what it implies; rules for hosts join those that are there."""
    rules: dict[str, dict[str, Any]] = {}
    found, implied = Layer(), Layer()
    for key, value in layer.items():
        if key.split(".")[0] == "hosts":
            pattern, name, setting = _host_setting(key, value)
            rules.setdefault(pattern, {})[name] = setting
        else:
            found[key] = checked(key, value)
            implied |= EXPANSIONS.get((key, found[key]), {}) if key.startswith("task.") else {}
    old = values.get("hosts", {})
    first = {pattern: old.get(pattern, {}) | table for pattern, table in rules.items()}
    return implied | found | {"hosts": first | {p: t for p, t in old.items() if p not in first}}


def _host_setting(key: str, value: Any) -> tuple[str, str, Any]:
    """The pattern, name and value of `hosts.PATTERN.NAME`, checked as the job's own setting is."""
    pattern, _, name = key.removeprefix("hosts.").rpartition(".")
    if not PATTERN.fullmatch(pattern):
        raise UsageError(f"{key}: expected {EXAMPLE}.")
    if name not in HOST_KEYS:
        hint = suggestion(name, HOST_KEYS) or ";"
        raise UsageError(f"unknown setting '{key}'{hint} known: {', '.join(HOST_KEYS)}.")
    try:
        return pattern, name, checked(HOST_KEYS[name], value)
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from error


def changed(job: Job, flags: Layer, environ: Mapping[str, str] | None = None) -> Job:
    """The same job with what environment and flags say on top."""
    values = {key: get(job, key) for key in keys()} | {"hosts": job.hosts}
    for layer in (_from_environment(os.environ if environ is None else environ), flags):
        values |= _on_top(values, layer)
    return build(values)


def differences(one: Job, two: Job) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, with both values."""
    pairs = {key: (get(one, key), get(two, key)) for key in keys()}
    pairs["hosts"] = (one.hosts, two.hosts)
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def build(values: Layer) -> Job:
    """A job from checked values, its cross-checks done."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    hints = get_type_hints(Job)
    for section, settings in tree.items():
        if is_dataclass(hints[section]):
            tree[section] = hints[section](**settings)
    return _cross_checked(Job(**tree))


def _cross_checked(job: Job) -> Job:
    names = [task for task in job.tasks if task.strip()]
    if not names or len(names) < len(job.tasks) or len(set(names)) < len(names):
        raise UsageError(
            f"tasks = {list(job.tasks)}: expected at least one name, and none twice, as in "
            "--tasks Krull,Alien."
        )
    if job.train.rounds > len(job.tasks):
        raise UsageError(
            f"train.rounds = {job.train.rounds}, but the job has {len(job.tasks)} tasks."
        )
    least = max(job.learn.batch_size, job.learn.n_step * job.train.num_envs)
    if job.replay.buffer_size < least:
        raise UsageError(
            f"replay.buffer_size = {job.replay.buffer_size}: expected at least {least}, a batch "
            "and learn.n_step steps of each environment."
        )
    return job


def checked(key: str, value: Any) -> Any:
    """A value of the key's type, inside its range; UsageError says what was found and expected."""
    known = keys()
    if key not in known:
        hint = suggestion(key, known) or "; `canal-mpi config` lists them."
        raise UsageError(f"unknown setting '{key}'{hint}")
    part, kind = known[key]
    value, meta = _typed(key, value, kind), part.metadata
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not isfinite(number):
            raise UsageError(f"{key} = {number}: expected a finite number.")
        if meta["low"] is not None and number < meta["low"]:
            raise UsageError(f"{key} = {number}: expected at least {meta['low']}.")
        if meta["high"] is not None and number > meta["high"]:
            raise UsageError(f"{key} = {number}: expected at most {meta['high']}.")
    if key == "share.topology":
        parse_topology(value, f"value for {key}")
    elif meta["names"]:
        for name in value if isinstance(value, tuple) else (value,):
            check_name(f"value for {key}", name, meta["names"], meta["outside"])
    return value


def _typed(key: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        items = items if isinstance(items, list | tuple) else [value]
        items = [item.strip() if isinstance(item, str) else item for item in items]
        return tuple(_typed(key, item, get_args(kind)[0]) for item in items)
    if kind is float and type(value) is int:
        return float(value) if abs(value) < 1 << 1000 else float("inf")
    if kind is int and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        return int(value)
    if type(value) is not kind:
        shown = "a huge number" if type(value) is int and abs(value) >> 64 else repr(value)
        raise UsageError(f"{key} = {shown:.100}: expected {KINDS[kind]}.")
    return value


def _from_environment(environ: Mapping[str, str]) -> Layer:
    names = {f"CANAL_{key.replace('.', '_').upper()}": key for key in keys()}
    layer: Layer = {}
    for variable, text in environ.items():
        if variable.startswith("CANAL_"):
            if variable not in names:
                hint = suggestion(variable, names, cutoff=0.8) or "; no setting has that name."
                raise UsageError(f"unknown environment variable {variable}{hint}")
            layer[names[variable]] = parse_value(text)
    return layer


def parse_value(text: str) -> Any:
    """A TOML value; anything that is none is taken as plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (ValueError, RecursionError):
        return text


def job_folders() -> list[Path]:
    """Where named jobs lie: in the installed package, or beside it in a checkout."""
    here = Path(__file__).parent
    return [folder for folder in (here / "jobs", here.parent / "jobs") if folder.is_dir()]


def named_jobs() -> dict[str, Path]:
    """The jobs that come with the package."""
    return {path.stem: path for folder in job_folders() for path in sorted(folder.glob("*.toml"))}


def find_job(name: str) -> Path:
    """The file of a named job, or the user's own file."""
    if name.endswith(".toml") or "/" in name:
        if not Path(name).is_file():
            what = "is not a regular file" if Path(name).exists() else "does not exist"
            raise UsageError(f"job file {name} {what}.")
        return Path(name)
    jobs = named_jobs()
    if name not in jobs:
        hint = suggestion(name, jobs) or ";"
        raise UsageError(
            f"unknown job '{name}'{hint} known: {', '.join(sorted(jobs))}, or path/to/my.toml."
        )
    return jobs[name]


def _bytes_of(path: Path) -> bytes:
    try:
        if path.stat().st_size > LONGEST_JOB:
            raise UsageError(f"job file {path} is larger than {LONGEST_JOB >> 20} MB.")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"job file {path} can't be read: {error.strerror}.") from error


def read_toml(data: bytes, where: str) -> Layer:
    """The settings in a TOML text, as dotted keys."""
    return dict(_flat(parse_toml(data, where)))


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """A TOML text, maybe of others: what would take long to parse or to walk is refused."""
    if len(data) > LONGEST_JOB or any(line.count(b".") > MOST_DOTS for line in data.splitlines()):
        raise UsageError(f"{where} is longer, or nested more deeply, than any job.")
    try:
        tree = tomllib.loads(data.decode())
        repr(tree)  # fails where it is nested too deeply
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not TOML: {error}.") from error
    return tree


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Sections as dotted keys; of those for hosts also the sections inside."""
    for name, value in tree.items():
        if isinstance(value, dict):
            inner = dict(_flat(value)) if name == "hosts" else value
            yield from ((f"{name}.{key}", setting) for key, setting in inner.items())
        else:
            yield name, value


def to_toml(job: Job, explain: bool = False) -> str:
    """The whole job as TOML that gives the same job again; `explain` adds each key's meaning."""
    lines, section = [], ""
    for key, (part, _) in keys().items():
        here, _, name = key.rpartition(".")
        if here != section:
            lines += ["", f"[{here}]"]
            section = here
        text, meta = f"{name} = {_toml_value(get(job, key))}", part.metadata
        names = ", ".join([*filter(None, meta["names"]), *["module:name"] * meta["outside"]])
        about = meta["about"] + f" ({names})" * bool(names)
        lines.append(f"{text:<31} # {about}" if explain else text)
    for pattern, table in job.hosts.items():
        lines += ["", f"[hosts.{_toml_value(pattern)}]"]
        lines += [f"{name} = {_toml_value(value)}" for name, value in table.items()]
    if explain and not job.hosts:
        lines += ["", '# [hosts."nano-*"] with device, threads, envs, speed: what differs there']
    return "\n".join(lines) + "\n"


def get(job: Job, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def from_toml(text: str) -> Job:
    """The job that `to_toml` wrote, maybe before some settings existed."""
    return build(_on_top({}, read_toml(text.encode(), "job")))


def with_tasks(job: Job, tasks: Sequence[str]) -> Job:
    """The same job with its tasks under their proper names."""
    return _cross_checked(replace(job, tasks=tuple(tasks)))


def on_host(job: Job, host: str) -> Job:
    """The job as it is on a host, known by its whole name or by what comes before its first dot."""
    names = (host, host.partition(".")[0])
    rules = [rule for p, rule in job.hosts.items() if any(fnmatchcase(n, p) for n in names)]
    for name, value in (item for rule in reversed(rules) for item in rule.items()):
        section, _, key = HOST_KEYS[name].partition(".")
        job = replace(job, **{section: replace(getattr(job, section), **{key: value})})
    return job
