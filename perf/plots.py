"""Makes the plots of docs/performance.md from results that bps-perf printed.

    cargo run --release -p bps-perf -- run all --keep perf/results/MACHINE.jsonl
    .venv/bin/python -m pip install matplotlib
    .venv/bin/python perf/plots.py perf/results/MACHINE.jsonl... [--out docs/img]

A result file has one JSON object a line, as `bps-perf COMMAND --json` prints it. Of several results of the same
command and arguments the last counts. A plot whose results are missing is left out, and that is said. matplotlib is
for this script alone; the package does not need it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # Before pyplot is imported.

import matplotlib.pyplot as plt

OURS, PEER, LIMIT = "#1f6f8b", "#c8553d", "#9aa5b1"
SIZES = {1 << 10: "Ki", 1 << 20: "Mi", 1 << 30: "Gi"}

Row = dict[str, object]


class Missing(Exception):
    """No result says what a plot shows."""


class Results:
    """All results, by command."""

    def __init__(self, paths: list[Path]) -> None:
        self.rows: list[Row] = []
        # Machines whose results have been asked for.
        self.machines: dict[str, None] = {}
        for path in paths:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if not line.strip():
                    continue
                try:
                    self.rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    sys.exit(f"{path}:{number}: not a JSON object: {error}")

    def all(self, command: str, **wanted: object) -> list[Row]:
        """Results of a command whose fields have these values, in the order of the file."""
        rows = [r for r in self.rows if r.get("command") == command]
        rows = [r for r in rows if all(r.get(key) == value for key, value in wanted.items())]
        if not rows:
            what = " ".join(f"{key}={value}" for key, value in wanted.items())
            raise Missing(f"no result of `bps-perf {command}` {what}".rstrip())
        for place in (row["place"] for row in rows if row.get("place")):
            self.machines[
                f"{place['processor']}, {place['cores']} CPUs, Linux {place['kernel']}"
            ] = None
        return rows

    def one(self, command: str, **wanted: object) -> Row:
        """The last of them."""
        return self.all(command, **wanted)[-1]

    def curve(
        self, command: str, x: str, y: str, **wanted: object
    ) -> tuple[list[float], list[float]]:
        """`y` by `x`, sorted; of several results with the same `x` the last one."""
        points = {row[x]: row[y] for row in self.all(command, **wanted) if x in row and y in row}
        if not points:
            raise Missing(f"no result of `bps-perf {command}` has both {x} and {y}")
        return tuple(list(side) for side in zip(*sorted(points.items()), strict=True))


def size(count: float) -> str:
    """Bytes as people write them."""
    for scale, name in sorted(SIZES.items(), reverse=True):
        if count >= scale:
            return f"{count / scale:g} {name}B"
    return f"{count:g} B"


def by_size(axes: plt.Axes, ticks: list[float], label: str = "bytes of a rank's tensor") -> None:
    """An axis of sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size(tick) for tick in ticks], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel(label)


def layers(results: Results, axes: plt.Axes) -> None:
    """Each layer's speed as a share of what the machine does without the engine."""
    found: list[tuple[str, float]] = []

    def add(name: str, share: Callable[[], float]) -> None:
        with suppress(Missing):
            found.append((name, share()))

    for dtype in ("f32", "bf16"):
        add(
            f"add {dtype}, 1 MiB\nof a plain loop",
            lambda: results.one("sum", dtype=dtype, size_bytes=1 << 20)["ratio_to_plain"],
        )
    for transport in ("tcp", "shm"):
        lane = {"transport": transport, "idle": "adaptive", "size_bytes": 1 << 20}
        bare = "send and recv" if transport == "tcp" else "one copy"
        add(
            f"lane, {transport}, 1 MiB\nof {bare}",
            lambda: results.one("lane", **lane)["gbps"] / results.one("lane", **lane)["bare_gbps"],
        )
        add(
            f"4 KiB there and back, {transport}\nof a bare ping-pong",
            lambda: 1 / results.one("latency", transport=transport, idle="adaptive")["ratio"],
        )
    add("cluster\nof the line", lambda: results.one("cluster")["fraction_of_line"])
    if not found:
        raise Missing("no result of any layer")
    names, shares = zip(*reversed(found), strict=True)
    axes.barh(names, shares, color=OURS)
    axes.axvline(1, color=LIMIT, linestyle="--")
    axes.set_xlabel("share of the bare machine's speed, measured beside it")


def gloo(results: Results, axes: plt.Axes) -> None:
    """push_pull beside gloo's all-reduce, by size."""
    drawn = []
    ways = (
        ("one host", "-", "shm", False),
        ("shm, by a server", "-.", "shm", True),
        ("tcp", "--", "tcp", True),
    )
    for name, style, transport, through in ways:
        which = {"transport": transport, "through_server": through}
        try:
            sizes, ours = results.curve("gloo", "size_bytes", "algbw_gbs", **which)
            _, theirs = results.curve("gloo", "size_bytes", "peer_algbw_gbs", **which)
        except Missing:
            continue
        axes.plot(sizes, ours, style, marker="o", color=OURS, label=f"push_pull, {name}")
        axes.plot(sizes, theirs, style, marker="o", color=PEER, label=f"gloo, in turn with {name}")
        drawn = sizes
    if not drawn:
        raise Missing("no result of `bps-perf gloo`")
    by_size(axes, drawn)
    axes.set_ylabel("GB/s of a rank's tensor")
    axes.set_ylim(bottom=0)
    axes.legend()


def cluster(results: Results, axes: plt.Axes) -> None:
    """Shares of the line that hosts with shaped links reach, ours and gloo's."""
    rows = {}
    for row in results.all("cluster"):
        mixed = "\nmixed" if row.get("colocated") else ""
        rows[f"{row['workers']} + {row['servers']}{mixed}"] = row
    names = list(rows)
    ours = [row["fraction_of_line"] for row in rows.values()]
    peers = [row.get("peer_algbw_gbs", 0) / row["line_gbs"] for row in rows.values()]
    places = range(len(names))
    axes.bar([place - 0.2 for place in places], ours, 0.4, color=OURS, label="push_pull")
    axes.bar([place + 0.2 for place in places], peers, 0.4, color=PEER, label="gloo")
    axes.axhline(1, color=LIMIT, linestyle="--")
    axes.set_xticks(list(places), names)
    axes.set_xlabel("workers + servers")
    axes.set_ylabel("share of the line")
    axes.legend()


def steps(results: Results, axes: plt.Axes) -> None:
    """What each step costs a byte, in processor seconds for a GB of a rank's tensor."""
    bottom_row = []
    add = 1 / results.one("sum", dtype="f32", size_bytes=1 << 20)["gbps"]
    for transport in ("tcp", "shm"):
        try:
            lane = results.one("lane", transport=transport, idle="adaptive", size_bytes=1 << 20)[
                "cpu_s_per_gb"
            ]
            whole = results.one("pushpull", transport=transport, size_bytes=16 << 20, tensors=1)[
                "cpu_s_per_gb"
            ]
        except Missing:
            continue
        rest = max(whole - 2 * lane - add, 0)
        bottom_row.append(
            (
                transport,
                [
                    ("lane to the server", lane),
                    ("addition", add),
                    ("lane back", lane),
                    ("rest", rest),
                ],
            )
        )
    if not bottom_row:
        raise Missing("no transport has results of both `lane` and `pushpull`")
    colours = dict(
        zip(
            ("lane to the server", "addition", "lane back", "rest"),
            (OURS, PEER, "#5ba3b8", LIMIT),
            strict=True,
        )
    )
    for transport, parts in bottom_row:
        left = 0.0
        for name, cost in parts:
            axes.barh(
                transport,
                cost,
                left=left,
                color=colours[name],
                label=name if transport == bottom_row[0][0] else None,
            )
            left += cost
    axes.set_xlabel(
        "processor seconds for a GB of a rank's tensor (lanes and addition measured alone)"
    )
    axes.legend(loc="lower right", fontsize="small")


def partition(results: Results, axes: plt.Axes) -> None:
    """push_pull by the size of parts."""
    drawn = []
    for transport, colour in (("tcp", OURS), ("shm", PEER)):
        try:
            wanted = {"transport": transport, "scenario": "partition"}
            sizes, speeds = results.curve("pushpull", "partition_bytes", "algbw_gbs", **wanted)
        except Missing:
            continue
        axes.plot(sizes, speeds, marker="o", color=colour, label=transport)
        drawn = sizes
    if not drawn:
        raise Missing("no result of the scenario `partition`")
    by_size(axes, drawn, "bytes of a part")
    axes.set_ylabel("GB/s of a rank's tensor")
    axes.set_ylim(bottom=0)
    axes.legend()


def scaling(results: Results, axes: plt.Axes) -> None:
    """A server's speed by its cores."""
    most = 1.0
    for transport, colour in (("tcp", OURS), ("shm", PEER)):
        try:
            cores, speedups = results.curve("scaling", "cores", "speedup", transport=transport)
        except Missing:
            continue
        axes.plot(cores, speedups, marker="o", color=colour, label=transport)
        most = max(most, *cores)
    if not axes.lines:
        raise Missing("no result of `bps-perf scaling`")
    axes.plot([1, most], [1, most], "--", color=LIMIT, label="linear")
    axes.set_xlabel("cores of the server")
    axes.set_ylabel("times as fast as one core")
    axes.legend()


def place_of(row: Row) -> str:
    """The hosts of a result of `bps-perf gpu`, and what joins them."""
    gpus = f" × {row['gpus_per_host']}" if row["gpus_per_host"] > 1 else ""
    servers = "colocated" if row["colocated"] and not row["servers"] else f"+ {row['servers']}"
    return f"{row['hosts']}{gpus} {servers}, {row['rate_bits'] / 1e9:g} Gbit/s"


def gpu_sums(results: Results, axes: plt.Axes) -> None:
    """Shares of the line that sums on GPUs reach, ours and NCCL's, at the largest size."""
    rows: dict[str, Row] = {}
    for row in results.all("gpu", work="sum", device="cuda"):
        known = rows.get(place_of(row))
        if "line_gbs" in row and (known is None or row["size_bytes"] >= known["size_bytes"]):
            rows[place_of(row)] = row
    if not rows:
        raise Missing("no sum of `bps-perf gpu` between hosts")
    for at, row in enumerate(rows.values()):
        best = max(
            row[f"{way}algbw_gbs"]
            for way in ("peer_", "hierarchical_", "tuned_")
            if f"{way}algbw_gbs" in row
        )
        for shift, speed, colour in ((-0.2, row["algbw_gbs"], OURS), (0.2, best, PEER)):
            axes.bar(at + shift, speed / row["line_gbs"], 0.4, color=colour)
    axes.bar(0, 0, color=OURS, label="push_pull")
    axes.bar(0, 0, color=PEER, label="NCCL, its best way")
    axes.axhline(1, color=LIMIT, linestyle="--")
    names = [f"{name}\n{size(row['size_bytes'])}" for name, row in rows.items()]
    axes.set_xticks(
        range(len(rows)), [name.replace(", ", "\n") for name in names], fontsize="x-small"
    )
    axes.set_ylabel("share of the line")
    axes.legend(fontsize="small", loc="lower left")


def gpu_steps(results: Results, axes: plt.Axes) -> None:
    """How many times as fast as with DistributedDataParallel steps are, and could be at most."""
    rows: dict[tuple[str, str], Row] = {}
    for row in results.all("gpu", device="cuda", hosts=4, gpus_per_host=1, colocated=False):
        if row.get("ratio") and "bound_ms" in row:
            name = f"{row['work']}\n{row['precision']}\n{row['rate_bits'] / 1e9:g} Gbit/s"
            rows[name, row["way"].partition("-")[0]] = row
    names = list(dict.fromkeys(name for name, _ in rows))
    if not names:
        raise Missing("no step of `bps-perf gpu` between 4 hosts")
    ways = (("ours", -0.2, OURS, "DistributedOptimizer"), ("cross", 0.2, "#5ba3b8", "CrossBarrier"))
    for way, shift, colour, label in ways:
        found = [(at, rows[name, way]) for at, name in enumerate(names) if (name, way) in rows]
        axes.bar(
            [at + shift for at, _ in found],
            [row["ratio"] for _, row in found],
            0.4,
            color=colour,
            label=label,
        )
        bounds = [row["peer_ms_p50"] / row["bound_ms"] for _, row in found]
        axes.hlines(
            bounds,
            [at + shift - 0.2 for at, _ in found],
            [at + shift + 0.2 for at, _ in found],
            color="black",
        )
    axes.axhline(1, color=PEER, linestyle="--")
    axes.set_xticks(range(len(names)), names, fontsize="x-small")
    axes.set_ylabel("times as fast as with DDP; black: the bound")
    axes.legend(fontsize="small", loc="lower left")


# Which fields of a probe are drawn: the variants' field, x, and y.
PROBES = {
    "zerocopy": ("send", "size_bytes", "cpu_s_per_gb"),
    "registered": ("receive", "size_bytes", "cpu_s_per_gb"),
    "multishot": ("receive", "size_bytes", "cpu_s_per_gb"),
    "ring": ("setup", "size_bytes", "cpu_s_per_gb"),
    "stores": ("work", "size_bytes", "ratio"),
    "scratch": (None, "piece_bytes", "ratio"),
    "hugepages": (None, "size_bytes", "ratio"),
    "flows": (None, "flows", "gbps"),
    "sockbuf": ("congestion", "buffer_bytes", "gbps"),
    "spin": ("think_us", "spin_us", "p50_us"),
}


def probe(results: Results, axes: plt.Axes, name: str) -> None:
    """One probe: a line for each variant."""
    variants, x, y = PROBES[name]
    rows = results.all("probe", probe=name)
    for variant in dict.fromkeys(row.get(variants) for row in rows):
        points = {row[x]: row[y] for row in rows if row.get(variants) == variant}
        axes.plot(
            [str(key) if isinstance(key, str) else key for key in points],
            list(points.values()),
            marker=".",
            label=variant,
        )
    if x.endswith("_bytes") and all(isinstance(row[x], int) for row in rows):
        by_size(axes, sorted({row[x] for row in rows}), "")
    elif x.endswith("_us") or x == "flows":
        axes.set_xlabel(x)
    if y == "ratio":
        axes.axhline(1, color=LIMIT, linestyle="--")
    axes.tick_params(labelsize="x-small")
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{name}: {y}", fontsize="small")
    if variants:
        axes.legend(fontsize="x-small", title=variants, title_fontsize="x-small")


def figures(results: Results) -> Iterator[tuple[str, plt.Figure]]:
    """Name and figure of each plot whose results are there."""
    plots = {
        "layers": layers,
        "gloo": gloo,
        "cluster": cluster,
        "steps": steps,
        "partition": partition,
        "scaling": scaling,
        "gpu-sums": gpu_sums,
        "gpu-steps": gpu_steps,
    }
    for name, draw in plots.items():
        figure, axes = plt.subplots(figsize=(7, 3.8))
        try:
            draw(results, axes)
        except Missing as missing:
            print(f"left out: {name}: {missing}")
            plt.close(figure)
            continue
        yield name, figure
    figure, grid = plt.subplots(5, 2, figsize=(8, 12))
    drawn = 0
    for name, axes in zip(PROBES, grid.flat, strict=False):
        try:
            probe(results, axes, name)
            drawn += 1
        except Missing as missing:
            print(f"left out: probe {name}: {missing}")
            axes.axis("off")
    if drawn:
        yield "probes", figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes plots from results of bps-perf.")
    parser.add_argument("results", type=Path, nargs="+", help="files with one JSON object a line")
    parser.add_argument("--out", type=Path, default=Path("docs/img"), help="where the PNG files go")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(results):
        # Where it was measured belongs into the picture, because pictures travel alone.
        machines, results.machines = results.machines, {}
        figure.text(0.99, 0.005, "\n".join(machines), ha="right", fontsize=5, color=LIMIT)
        height = figure.get_figheight() * 72
        figure.tight_layout(rect=(0, (4 + 6 * len(machines)) / height, 1, 1))
        path = arguments.out / f"{name}.png"
        figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})
        plt.close(figure)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
