"""The picture of ``--plot``; matplotlib is imported here and nowhere else."""

from __future__ import annotations

from pathlib import Path


def check() -> None:
    """Raise ImportError before anything is measured when there is nothing to draw with."""
    import matplotlib  # noqa: F401


def draw(path: Path, top: dict, records: list[dict]) -> None:
    """Time over T where there are several T, else one bar per record with its floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [r for r in records if r["eager_ms"] is not None]
    lengths = {r["shape"]["T"] for r in timed}
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    if len(lengths) > 2:
        _lines(axes, timed)
    else:
        _bars(axes, timed)
    commit, date = top["commit"], top["date"][:10]
    axes.set_title(f"{top['device']}, torch {top['torch']}, commit {commit}, {date}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _time(record: dict) -> float:
    return record["eager_ms"] if record["graph_ms"] is None else record["graph_ms"]


def _lines(axes, records: list[dict]) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        name = f"{record['op']} ({record['contender']}), {record['mode']}"
        series.setdefault(name, []).append((record["shape"]["T"], _time(record)))
    for name, points in sorted(series.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="T (tokens)", ylabel="ms (graph replay, else eager)"
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()


def _bars(axes, records: list[dict]) -> None:
    from flaop.bench.report import cells

    labels = [" ".join(cells(r)[i] for i in (0, 1, 2, 3, 4)) for r in records]
    axes.barh(labels, [_time(r) for r in records])
    floors = [r["floor_ms"] for r in records]
    axes.plot(floors, labels, "k|", markersize=18, label="floor")
    axes.set(xlabel="ms (graph replay, else eager)")
    axes.invert_yaxis()
    axes.legend()
