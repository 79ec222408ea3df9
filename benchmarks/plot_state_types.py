"""The picture of bench_state_types.py: a panel per type of state, a line per operation."""

from pathlib import Path

_SHOWN = {
    "get": "get",
    "set": "set",
    "update": "update",
    "element": "get a part",
    "split+merge": "split + merge",
    "encode": "encode",
}
_TITLES = {
    "value int": "value: int",
    "value dataclass": "value: dataclass of five fields, 90 B",
    "list": "list of 10 int",
    "map": "map of 10 str to int",
    "nested": "dict[str, list[dataclass]], 400 B",
}
_STYLES = {
    "statekit": ("#08519c", "o", 110),
    "dict": ("#bdbdbd", "|", 90),
    "dict + msgpack": ("#636363", "s", 32),
    "rocksdict raw": ("#d95f0e", "^", 40),
    "rocksdict pickled": ("#fdae6b", "v", 40),
    "lmdb": ("#31a354", "D", 30),
    "sqlite3": ("#756bb1", "X", 40),
}


def plot(table: dict[str, dict[str, dict[str, float]]], keys: int, beside: Path) -> None:
    """table: type of state -> operation -> contender -> ns per key."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(14, 7.5), dpi=130, sharex=True, sharey=True)
    flat = list(panels.flat)
    rows = list(_SHOWN)
    for axes, (name, operations) in zip(flat, table.items(), strict=False):
        for at, operation in enumerate(rows):
            found = operations.get(operation, {})
            if found:
                axes.plot(
                    [min(found.values()), max(found.values())], [at, at], color="#e6e6e6", zorder=1
                )
            for contender, (color, marker, size) in _STYLES.items():
                if contender in found:
                    front = 2 if contender == "statekit" else 3  # its large marker goes behind
                    axes.scatter(found[contender], at, size, color, marker, zorder=front)
        axes.set_title(_TITLES[name], loc="left", fontsize=11)
        axes.set_xscale("log")
        axes.set_yticks(range(len(rows)), [_SHOWN[row] for row in rows])
        axes.axhline(3.5, color="#999999", linewidth=0.6, linestyle=":")
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.set_xlabel("ns per key")
        axes.spines[["top", "right"]].set_visible(False)
    flat[0].invert_yaxis()
    legend = flat[-1]
    legend.axis("off")
    for contender, (color, marker, size) in _STYLES.items():
        legend.scatter([], [], size, color, marker, label=contender)
    legend.legend(frameon=False, loc="center", fontsize=11, title="left is better")
    figure.suptitle(
        f"Typed state, {keys:,} keys: one key a call above the dotted line, all keys at once below",
        x=0.01,
        ha="left",
        fontsize=13,
    )
    figure.tight_layout()
    path = beside.with_suffix(".png")
    figure.savefig(path)
    print(f"plot written to {path}")
