"""Leaderboard: the best of each game, in nested state that outlives the program.

Under each game there is a dict[str, dict[str, int]]: seasons, and in each the best score of each
player. A list of dataclasses keeps the latest results of a game. The state is at home in a RocksDB
directory, which is closed and opened again half-way. Plain dicts and sorted() say whether it is
right.

    python examples/leaderboard.py
"""

import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import statekit as sk

SEED = 11
RESULTS = 12_000
GAMES, PLAYERS, SEASONS = 40, 500, 4
LATEST, TOP = 5, 3

Seasons = dict[str, dict[str, int]]  # season -> player -> best score


@dataclass
class Result:
    player: str
    season: str
    score: int


def results() -> list[tuple[str, Result]]:
    rng = random.Random(SEED)
    return [
        (
            f"game-{rng.randrange(GAMES):02d}",
            Result(
                player=f"player-{rng.randrange(PLAYERS):03d}",
                season=f"season-{rng.randrange(SEASONS)}",
                score=rng.randrange(1_000_000),
            ),
        )
        for _ in range(RESULTS)
    ]


class Leaderboard:
    def __init__(self, kv: sk.KVProvider) -> None:
        self.best = kv.state("best", Seasons)
        self.latest = kv.list("latest", Result)

    def record(self, game: str, result: Result) -> None:
        players = self.best[game][result.season]  # a view: nothing is read yet
        if result.score > players.get(result.player, -1):
            players[result.player] = result.score
        latest = self.latest[game]
        latest.append(result)
        if len(latest) > LATEST:
            latest.pop(0)

    def top(self, game: str, season: str) -> list[tuple[str, int]]:
        return ranked(self.best[game][season].items())


def ranked(scores: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The first ones: by score, then by name."""
    return sorted(scores, key=lambda item: (-item[1], item[0]))[:TOP]


def wrong_games(board: Leaderboard, stream: list[tuple[str, Result]]) -> list[str]:
    """The games whose state is not what plain Python makes of the stream."""
    scores: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    latest: dict[str, list[Result]] = defaultdict(list)
    for game, result in stream:
        players = scores[game, result.season]
        players[result.player] = max(result.score, players.get(result.player, -1))
        latest[game].append(result)
    wrong = [game for game in latest if board.latest[game] != latest[game][-LATEST:]]
    wrong += [
        game
        for (game, season), players in scores.items()
        if board.top(game, season) != ranked(players.items()) or board.best[game][season] != players
    ]
    return wrong


def main() -> None:
    stream = results()
    half = len(stream) // 2
    with tempfile.TemporaryDirectory() as directory:
        url = f"rocksdb:{directory}/board?memory=8MiB"
        with sk.open(url) as kv:
            board = Leaderboard(kv)
            for game, result in stream[:half]:
                board.record(game, result)
            print(f"first run: {half:,} results of {len(board.latest)} games, then closed")

        with sk.open(url) as kv:
            board = Leaderboard(kv)
            for game, result in stream[half:]:
                board.record(game, result)
            print(f"second run: {len(stream) - half:,} more on top of what was stored")
            for game in ("game-07", "game-23"):
                first = board.top(game, "season-0")
                print(f"{game}:", ", ".join(f"{player} {score:,}" for player, score in first))
            wrong = wrong_games(board, stream)
            fetched = kv.metrics().states["best"].fetches
    if wrong:
        raise SystemExit(f"these games are wrong: {', '.join(wrong)} (seed {SEED})")
    print(f"all {GAMES} games are right; {fetched} entries were fetched from disk")


if __name__ == "__main__":
    main()
