"""Settings that differ between hosts: rules of the job, matched on the host's name.

`[hosts."nano-*"]` with `device`, `threads`, `envs`, `speed`: of several rules that match, the first
one that has a setting decides, so the particular comes before the general.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from canal_mpi import pick
from canal_mpi.errors import UsageError

if TYPE_CHECKING:
    from canal_mpi.job import Job

# A host's setting, and the setting of the job that it replaces there.
HOST_KEYS = {
    "device": "learn.device",
    "threads": "learn.threads",
    "envs": "train.envs",
    "speed": "train.speed",
}
PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,253}")
EXAMPLE = '[hosts."nano-*"] with device = "cpu", threads = 4'
Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class HostRule:
    """What is different on hosts whose name matches a pattern such as nano-*."""

    pattern: str
    settings: tuple[tuple[str, Any], ...]

    def matches(self, host: str) -> bool:
        """By the whole name, or by what comes before its first dot."""
        return fnmatchcase(host, self.pattern) or fnmatchcase(host.partition(".")[0], self.pattern)


Rules = tuple[HostRule, ...]


def split(layer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a layer that are for some hosts (by pattern), and all others."""
    rest = {k: v for k, v in layer.items() if k != "hosts" and not k.startswith("hosts.")}
    found = layer.get("hosts", {})
    if not isinstance(found, dict):
        raise UsageError(f"hosts = {found!r}: expected tables, as in {EXAMPLE}.")
    tables = {
        k: dict(inside) if isinstance(inside, dict) else inside for k, inside in found.items()
    }
    for key, value in layer.items():
        if key.startswith("hosts."):  # --set hosts.nano-*.threads=4
            pattern, dot, name = key.removeprefix("hosts.").rpartition(".")
            if not dot or not isinstance(tables.get(pattern, {}), dict):
                raise UsageError(f"{key}: expected hosts.PATTERN.SETTING, as in hosts.nano-*.envs.")
            tables.setdefault(pattern, {})[name] = value
    return tables, rest


def rules_of(tables: Mapping[str, Any], check: Check) -> Rules:
    """Rules from tables, each setting checked as the job's own is."""
    return tuple(_rule(pattern, inside, check) for pattern, inside in tables.items())


def _rule(pattern: str, inside: Any, check: Check) -> HostRule:
    if not PATTERN.fullmatch(pattern) or not isinstance(inside, dict):
        raise UsageError(f"hosts.{pattern}: expected the name of a host, as in {EXAMPLE}.")
    settings = []
    for name, value in inside.items():
        if name not in HOST_KEYS:
            hint = pick.suggestion(name, HOST_KEYS) or ";"
            known = ", ".join(HOST_KEYS)
            raise UsageError(f"hosts.{pattern}: unknown setting '{name}'{hint} known: {known}.")
        try:
            settings.append((name, check(HOST_KEYS[name], value)))
        except UsageError as error:
            raise UsageError(f"hosts.{pattern}.{name}: {error}") from error
    return HostRule(pattern, tuple(settings))


def merged(new: Rules, old: Rules) -> Rules:
    """Both sets of rules; the new ones come first."""
    before = {rule.pattern: dict(rule.settings) for rule in old}
    first = [
        HostRule(rule.pattern, tuple((before.pop(rule.pattern, {}) | dict(rule.settings)).items()))
        for rule in new
    ]
    return (*first, *(rule for rule in old if rule.pattern in before))


def tables_of(rules: Rules) -> dict[str, dict[str, Any]]:
    """The rules as the tables they came from."""
    return {rule.pattern: dict(rule.settings) for rule in rules}


def on_host(job: "Job", host: str) -> "Job":
    """The job as it is on a host."""
    for rule in reversed([rule for rule in job.hosts if rule.matches(host)]):
        for name, value in rule.settings:
            section, _, key = HOST_KEYS[name].partition(".")
            part = replace(getattr(job, section), **{key: value})
            job = replace(job, **{section: part})
    return job
