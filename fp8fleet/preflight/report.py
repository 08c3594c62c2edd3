"""Preflight's results: a table for people, reports/preflight-<host>.json for programs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8fleet.preflight.codes import CODES
from fp8fleet.preflight.findings import Finding, Judgement

REPORTS = Path("reports")


def stopping(findings: Iterable[Finding], ignored: frozenset[str]) -> list[Finding]:
    """The errors that stop a host."""
    return [f for f in findings if f.severity == "error" and f.code not in ignored]


def summary(host: str, judgement: Judgement, ignored: frozenset[str]) -> str:
    """One line, such as ``preflight gpu-1: 1 error, 2 warnings, 0 ignored``."""
    stopped = len(stopping(judgement.findings, ignored))
    passed = [f for f in judgement.findings if f.code in ignored]
    warnings = [f for f in judgement.findings if f.severity == "warning" and f not in passed]
    errors = f"{stopped} error{'' if stopped == 1 else 's'}"
    warned = f"{len(warnings)} warning{'' if len(warnings) == 1 else 's'}"
    return f"preflight {host}: {errors}, {warned}, {len(passed)} ignored"


def write_report(
    host: str,
    judgement: Judgement,
    *,
    full: bool,
    ignored: frozenset[str],
    folder: Path = REPORTS,
) -> Path:
    """Write ``preflight-<host>.json`` whole, beside and renamed.

    Returns:
        Its path. Characters of the host's name that a file name cannot have are written as ``_``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"preflight-{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.json"
    beside = path.with_suffix(".new")
    report = as_json(host, judgement, full=full, ignored=ignored)
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


def as_json(
    host: str, judgement: Judgement, *, full: bool, ignored: frozenset[str]
) -> dict[str, Any]:
    """The report as plain data; docs/preflight.md describes it."""
    errors = stopping(judgement.findings, ignored)
    findings = [
        {**dataclasses.asdict(f), "severity": f.severity, "ignored": f.code in ignored}
        for f in judgement.findings
    ]
    facts = dataclasses.asdict(judgement.facts) if judgement.facts else None
    return {
        "host": host,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "mode": "full" if full else "fast",
        "passed": not errors,
        "ignore": sorted(ignored),
        "findings": findings,
        "facts": plain(facts),
    }


def plain(value: Any) -> Any:
    """Sets as sorted lists, so that JSON takes them."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def table(host: str, judgement: Judgement, ignored: frozenset[str]) -> Table:
    """The findings for people."""
    title = Text(summary(host, judgement, ignored), style="bold")
    shown = Table(title=title, title_justify="left")
    for column in ("Code", "Severity", "Found", "Needed", "What to do"):
        shown.add_column(column, overflow="fold", no_wrap=column == "Severity")
    for finding in judgement.findings:
        severity = "ignored" if finding.code in ignored else finding.severity
        style = {"error": "red", "warning": "yellow"}.get(severity, "dim")
        cells = (finding.code, severity, finding.found, finding.needed, finding.remedy)
        # as Text: what a host prints may look like rich's markup
        shown.add_row(*map(Text, cells), style=style)
    return shown


def show(host: str, judgement: Judgement, ignored: frozenset[str]) -> None:
    """Print the table on stderr; stdout may be JSON."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=160)
    console.print(table(host, judgement, ignored))


def codes_table() -> str:
    """The Markdown table of all codes, as docs/preflight.md has it."""
    lines = ["| Code | Severity | Meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {code.severity} | {code.meaning} |" for name, code in CODES.items()]
    return "\n".join(lines)
