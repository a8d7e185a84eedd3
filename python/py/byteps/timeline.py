"""Makes one timeline of the files that ranks and servers have written.

``python -m byteps.timeline merge FOLDER`` reads every ``comm.json`` below the folder and writes
``FOLDER/timeline.json``, which https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "merge"]


def merge(folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Merges the timelines below ``folder`` into one file and returns its path.

    The times of all files are those of the scheduler's clock, so nothing is moved. The tracks of
    servers, which know parts by number, get the names of the tensors. Raises ``FileNotFoundError``
    where there is no timeline and ``ValueError`` where a file is none.
    """
    folder = Path(folder)
    output = Path(output) if output is not None else folder / "timeline.json"
    paths = sorted(folder.glob("*/comm.json"))
    if not paths:
        raise FileNotFoundError(
            f"there is no timeline in {folder}: files are {folder}/RANK/comm.json and "
            f"{folder}/server-INDEX/comm.json; run with BYTEPS_TRACE_ON=1"
        )
    traces = {path: _read(path) for path in paths}
    names = dict(_part_names(traces.values()))
    metadata: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    pids: dict[int, Path] = {}
    for path, trace in traces.items():
        metadata[path.parent.name] = trace.get("metadata")
        for event in trace["traceEvents"]:
            first = pids.setdefault(event["pid"], path)
            if first != path:
                raise ValueError(
                    f"{first} and {path} are of the same process: of two jobs? Give each job a "
                    "folder of its own"
                )
            events.append(_named(event, names))
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "metadata": metadata}
    output.write_text(json.dumps(whole, separators=(",", ":")))
    return output


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is no timeline: {error}; was it copied while it was being written?"
        ) from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is no timeline: it has no list traceEvents")
    return trace


def _tracks(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The arguments of the events that name a part's track."""
    for event in events:
        if event.get("name") == "thread_name" and "key" in event["args"]:
            yield event["args"]


def _part_names(traces: Any) -> Iterator[tuple[int, str]]:
    for trace in traces:
        if str((trace.get("metadata") or {}).get("who", "")).startswith("rank"):
            for args in _tracks(trace["traceEvents"]):
                yield args["key"], args["name"]


def _named(event: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """A server's track of a key, with the name of the part."""
    for args in _tracks([event]):
        name = names.get(args["key"], args["name"])
        if name == args["name"]:
            return event | {"args": args}
        return event | {"args": args | {"name": f"{args['name']}: {name}"}}
    return event


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 if the file was written, 1 if not, and a line that says why."""
    parser = argparse.ArgumentParser(prog="python -m byteps.timeline", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("merge", help="make one file of those of all ranks and servers")
    command.add_argument("folder", help="BYTEPS_TRACE_DIR, or what start_timeline was given")
    command.add_argument("-o", "--output", help="the file to write; FOLDER/timeline.json if absent")
    options = parser.parse_args(arguments)
    try:
        path = merge(options.folder, options.output)
    except (OSError, ValueError) as error:
        print(f"byteps.timeline: error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
