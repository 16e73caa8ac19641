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
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from canal_mpi.errors import UsageError, check_name, suggestion
from canal_mpi.settings import EXPANSIONS, PRESETS, HostRule, Job, Layer
from canal_mpi.topology.graphs import parse_topology

# A host's setting, and the setting of the job that it replaces there.
HOST_KEYS = {
    "device": "learn.device",
    "threads": "learn.threads",
    "envs": "train.num_envs",
    "speed": "train.speed",
}
PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,253}")
EXAMPLE = '[hosts."nano-*"] with device = "cpu", threads = 4'
LONGEST_JOB = 1 << 20  # bytes of a job file
Rules = tuple[HostRule, ...]


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
    tables, rest = _split_hosts(layer)
    found = {key: checked(key, value) for key, value in rest.items()}
    implied: Layer = {}
    for item in found.items():
        implied |= EXPANSIONS.get(item, {})
    rules = [_rule(pattern, table) for pattern, table in tables.items()]
    return implied | found | {"hosts": _merged(rules, values.get("hosts", ()))}


def changed(job: Job, flags: Layer, environ: Mapping[str, str] | None = None) -> Job:
    """The same job with what environment and flags say on top."""
    values = {key: get(job, key) for key in keys()} | {"hosts": job.hosts}
    for layer in (_from_environment(os.environ if environ is None else environ), flags):
        values |= _on_top(values, layer)
    return build(values)


def differences(one: Job, two: Job) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, with both values."""
    pairs = {key: (get(one, key), get(two, key)) for key in keys()}
    pairs["hosts"] = (_tables_of(one.hosts), _tables_of(two.hosts))
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
    if not all(task.strip() for task in job.tasks):
        raise UsageError(f"tasks = {list(job.tasks)} holds an empty name.")
    if not job.tasks:
        raise UsageError("tasks is empty: name at least one, as in --tasks Krull,Alien.")
    twice = [task for task in job.tasks if job.tasks.count(task) > 1]
    if twice:
        raise UsageError(f"task '{twice[0]}' is listed twice; name each task once.")
    if job.train.rounds > len(job.tasks):
        raise UsageError(
            f"train.rounds = {job.train.rounds}, but the job has {len(job.tasks)} tasks."
        )
    if job.replay.buffer_size < job.learn.batch_size:
        raise UsageError(
            f"replay.buffer_size = {job.replay.buffer_size} is less than a batch "
            f"({job.learn.batch_size})."
        )
    if job.replay.buffer_size // job.train.num_envs < job.learn.n_step:
        raise UsageError(
            f"replay.buffer_size = {job.replay.buffer_size} for {job.train.num_envs} environments "
            f"holds fewer than {job.learn.n_step} steps of each (learn.n_step); give more."
        )
    if job.learn.lr == 0:
        raise UsageError("learn.lr = 0 learns nothing; give a positive number, as in 0.0005.")
    return job


def checked(key: str, value: Any) -> Any:
    """A value of the key's type, inside its range; UsageError says what was found and expected."""
    known = keys()
    if key not in known:
        hint = suggestion(key, known) or "; `canal-mpi config` lists them."
        raise UsageError(f"unknown setting '{key}'{hint}")
    part, kind = known[key]
    value = _typed(key, value, kind)
    meta = part.metadata
    for number in value if isinstance(value, tuple) else (value,):
        _check_range(key, number, meta)
    if key == "share.topology":
        parse_topology(value, f"value for {key}")
    elif meta["names"]:
        check_name(f"value for {key}", value, meta["names"], meta["outside"])
    return value


def _typed(key: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            items = [value]
        return tuple(_typed(key, _stripped(item), get_args(kind)[0]) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1 << 1000 else float("inf")
    if kind is int and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise UsageError(f"{key} = {_short(value)}: expected {wanted[kind]}.")
    return value


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) < 100 else f"{text[:100]}…"


def _stripped(item: Any) -> Any:
    return item.strip() if isinstance(item, str) else item


def _check_range(key: str, value: Any, meta: Mapping[str, Any]) -> None:
    low, high = meta["low"], meta["high"]
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{key} = {value}: expected a finite number.")
    if low is not None and value < low:
        raise UsageError(f"{key} = {value}: expected at least {low}.")
    if high is not None and value > high:
        raise UsageError(f"{key} = {value}: expected at most {high}.")


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


def parse_assignment(text: str) -> tuple[str, Any]:
    """`learn.lr=0.001` as key and value."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: expected section.key=value, as in learn.lr=0.001.")
    return key.strip(), parse_value(value.strip())


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
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not TOML: {error}.") from error
    layer: Layer = {}
    for name, value in tree.items():
        if isinstance(value, dict) and name != "hosts":
            layer |= {f"{name}.{inner}": setting for inner, setting in value.items()}
        else:
            layer[name] = value
    return layer


def to_toml(job: Job, explain: bool = False) -> str:
    """The whole job as TOML that gives the same job again; `explain` adds each key's meaning."""
    lines, section = [], ""
    for key, (part, _) in keys().items():
        here, _, name = key.rpartition(".")
        if here != section:
            lines += ["", f"[{here}]"]
            section = here
        value = get(job, key)
        text = f"{name} = {_toml_value(value)}"
        lines.append(f"{text:<31} # {part.metadata['about']}" if explain else text)
    for pattern, table in _tables_of(job.hosts).items():
        lines += ["", f"[hosts.{_toml_value(pattern)}]"]
        lines += [f"{name} = {_toml_value(value)}" for name, value in table.items()]
    if explain and not job.hosts:
        lines += ["", f"# {EXAMPLE}, envs = 1: what differs on such hosts"]
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


# ── settings that differ per host ──────────────────────────────────────────────────────────────


def _split_hosts(layer: Layer) -> tuple[dict[str, Any], Layer]:
    """The settings of a layer that are for some hosts (by pattern), and all others."""
    rest = {k: v for k, v in layer.items() if k != "hosts" and not k.startswith("hosts.")}
    found = layer.get("hosts", {})
    if not isinstance(found, dict):
        raise UsageError(f"hosts = {found!r}: expected tables, as in {EXAMPLE}.")
    tables = {k: dict(v) if isinstance(v, dict) else v for k, v in found.items()}
    for key, value in layer.items():
        if key.startswith("hosts."):  # --set hosts.nano-*.threads=4
            pattern, dot, name = key.removeprefix("hosts.").rpartition(".")
            if not dot or not isinstance(tables.get(pattern, {}), dict):
                raise UsageError(f"{key}: expected hosts.PATTERN.SETTING, as in hosts.nano-*.envs.")
            tables.setdefault(pattern, {})[name] = value
    return tables, rest


def _rule(pattern: str, table: Any) -> HostRule:
    """A rule from its table, each setting checked as the job's own is."""
    if not PATTERN.fullmatch(pattern) or not isinstance(table, dict):
        raise UsageError(f"hosts.{pattern}: expected the name of a host, as in {EXAMPLE}.")
    settings = []
    for name, value in table.items():
        if name not in HOST_KEYS:
            hint = suggestion(name, HOST_KEYS) or ";"
            known = ", ".join(HOST_KEYS)
            raise UsageError(f"hosts.{pattern}: unknown setting '{name}'{hint} known: {known}.")
        try:
            settings.append((name, checked(HOST_KEYS[name], value)))
        except UsageError as error:
            raise UsageError(f"hosts.{pattern}.{name}: {error}") from error
    return HostRule(pattern, tuple(settings))


def _merged(new: Sequence[HostRule], old: Rules) -> Rules:
    """Both sets of rules; the new ones come first."""
    before = {rule.pattern: dict(rule.settings) for rule in old}
    first = [
        HostRule(rule.pattern, tuple((before.pop(rule.pattern, {}) | dict(rule.settings)).items()))
        for rule in new
    ]
    return (*first, *(rule for rule in old if rule.pattern in before))


def _tables_of(rules: Rules) -> dict[str, dict[str, Any]]:
    """The rules as the tables they came from."""
    return {rule.pattern: dict(rule.settings) for rule in rules}


def on_host(job: Job, host: str) -> Job:
    """The job as it is on a host."""
    for rule in reversed([rule for rule in job.hosts if rule.matches(host)]):
        for name, value in rule.settings:
            section, _, key = HOST_KEYS[name].partition(".")
            part = replace(getattr(job, section), **{key: value})
            job = replace(job, **{section: part})
    return job
