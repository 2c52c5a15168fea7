"""Samples of several sources, as often as their weights say."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from axrt.config import Config, Data
from axrt.data.blend import Blend, blended
from axrt.data.corpus import load
from axrt.data.windows import Windows
from axrt.errors import ConfigError


def blend(*weights: float, seed: int = 0) -> Blend:
    rows = [
        np.full(1000, number, np.uint8) + np.arange(1000) % 7 * 10 for number in range(len(weights))
    ]
    sources = [Windows(row, 8, seed, 256) for row in rows]
    return Blend(sources, weights, seed)


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (1, 3, 5), (1, 1000), (2.5,)])
def test_each_source_has_its_share_and_no_sample_is_left_out(weights: tuple[float, ...]) -> None:
    samples = blend(*weights)
    places = [samples.place_of(n) for n in range(20_000)]
    for number in (1024, 5000, 20_000):
        count = Counter(source for source, _ in places[:number])
        for source, weight in enumerate(weights):
            share = number * weight / sum(weights)
            within = 2 if number % 1024 == 0 else 60  # a block is in a random order
            assert abs(count[source] - share) <= within
    for source in range(len(weights)):
        mine = [number for of, number in places if of == source]
        assert sorted(mine)[: len(mine) - 1024] == list(range(len(mine)))[: len(mine) - 1024]


def test_a_sample_is_the_same_whenever_it_is_asked_for() -> None:
    samples, again = blend(1, 3), pickle.loads(pickle.dumps(blend(1, 3)))
    of_another_seed = blend(1, 3, seed=1)
    forth = [samples.place_of(n) for n in range(5000)]
    assert [again.place_of(n) for n in reversed(range(5000))] == forth[::-1]
    assert [of_another_seed.place_of(n) for n in range(5000)] != forth
    far = 10**12 + 7
    assert blend(1, 3).place_of(far) == samples.place_of(far)


def test_a_microbatch_has_the_rows_of_its_sources() -> None:
    samples = blend(1, 1)
    inputs, targets = samples.microbatch(0, 64)
    assert inputs.shape == targets.shape == (64, 8)
    of = [int(row[0]) % 10 for row in inputs]
    assert of == [samples.place_of(n)[0] for n in range(64)]
    assert 20 < sum(of) < 44


def test_validation_has_the_same_shares() -> None:
    rows = [int(row[0]) % 10 for inputs, _ in blend(1, 3).evenly(4, 4) for row in inputs]
    assert Counter(rows) == {0: 4, 1: 12}


def test_sources_of_several_types_are_read_and_held_out_alike(tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (np.arange(100, dtype=np.uint16) + 1000).tofile(tmp_path / "b.bin")
    names = (str(tmp_path / "a.bin"), str(tmp_path / "b.bin"))
    corpus = load(Data(source=names, held_out=0.1), context=4, vocab=2000)
    assert [len(row) for row in corpus.training] == [180, 90]
    assert [row.tolist()[0] for row in corpus.held_out] == [180, 1090]
    corpus = load(Data(source=names, validation=names[1]), context=4, vocab=2000)
    assert [len(row) for row in corpus.held_out] == [100]
    rows = [Windows(row, 4, 0, 2000) for row in corpus.training]
    assert isinstance(blended(rows, (1.0, 2.0), 0), Blend)
    assert blended(rows[:1], (), 0) is rows[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"source": []}, r"data.source = \[\]; expected at least one"),
        ({"source": ["a.bin", "b.txt"]}, "one is a token file and another is text"),
        ({"source": ["a.bin", "b.bin"], "weights": [1.0]}, r"weights = \[1.0\] for 2 sources"),
        ({"source": ["a.bin", "b.bin"], "weights": [1.0, 0.0]}, "a number above 0 for each"),
        ({"source": "a.bin", "weights": [1.0, 2.0]}, "for 1 sources"),
    ],
)
def test_what_does_not_fit_is_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.read({"data": data})
