"""Generators of random numbers as part of a state: which, and whose numbers all go on with."""

from __future__ import annotations

import random
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError
from byteps.torch.elastic import RandomState, TorchState


class Gpus:
    """As many as one process sees, with a generator of torch each; it has selected one.

    In place of the functions of ``torch.cuda`` that a RandomState calls. They are those of a
    machine that has no GPU, so none of the others would get far.
    """

    def __init__(self, count, selected=0, begun=True):
        self.generators = [torch.Generator().manual_seed(100 + gpu) for gpu in range(count)]
        self.patches = [
            mock.patch.object(torch.cuda, name, stands_in)
            for name, stands_in in {
                "is_initialized": lambda: begun,
                "device_count": lambda: count,
                "current_device": lambda: selected,
                "get_rng_state": lambda device: self.generators[device].get_state(),
                "set_rng_state": lambda state, device: self.generators[device].set_state(state),
            }.items()
        ]

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()

    def draw(self):
        """The next number of each."""
        return [torch.rand((), generator=one).item() for one in self.generators]


def own_generators(seed=0):
    """One of each kind that a program may make."""
    return (
        torch.Generator().manual_seed(seed),
        np.random.default_rng(seed),
        np.random.RandomState(seed),
        random.Random(seed),
    )


def draw(own=()):
    """The next number of each generator."""
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
    for one in own:
        is_torchs = isinstance(one, torch.Generator)
        drawn.append(torch.rand((), generator=one).item() if is_torchs else one.random())
    return drawn


def test_generators_go_back_again_and_again():
    own = own_generators()
    with Gpus(3, selected=1) as gpus:
        state = TorchState(random=RandomState(*own), step=0)
        committed = draw(own), gpus.draw()
        for _ in range(2):
            draw(own), gpus.draw()
            state.restore()
            assert (draw(own), gpus.draw()) == committed


def test_gpus_are_counted_from_the_selected_one_on():
    with Gpus(4, selected=2) as there:
        state = RandomState().state_dict()
        drawn = there.draw()
    with Gpus(4, selected=1) as here:
        RandomState().load_state_dict(state)
        assert here.draw() == [drawn[1], drawn[2], drawn[3], drawn[0]]
    with Gpus(2, selected=1) as fewer:
        RandomState().load_state_dict(state)
        assert fewer.draw() == [drawn[3], drawn[2]]
    untouched = Gpus(6).draw()
    with Gpus(6, selected=3) as more:
        RandomState().load_state_dict(state)
        assert more.draw() == [drawn[1], *untouched[1:3], drawn[2], drawn[3], drawn[0]]


def test_a_process_that_has_not_begun_to_use_cuda_is_left_alone():
    with Gpus(2) as there:
        with_gpus = RandomState().state_dict()
        there.draw()
    untouched = Gpus(2).draw()
    with Gpus(2, begun=False) as here:
        assert "cuda" not in RandomState().state_dict()
        here.draw()
        RandomState().load_state_dict(with_gpus)
        assert here.draw() != untouched
    with Gpus(2) as here:
        with Gpus(2, begun=False):
            without = RandomState().state_dict()
        RandomState().load_state_dict(without)
        assert here.draw() == untouched


@pytest.mark.gpu
def test_gpus_go_back():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")

    def drawn():
        gpus = range(torch.cuda.device_count())
        return [torch.rand(3, device=f"cuda:{gpu}").tolist() for gpu in (*gpus, *gpus)]

    selected, count = torch.cuda.current_device(), torch.cuda.device_count()
    own = torch.Generator("cuda").manual_seed(1)
    state = TorchState(random=RandomState(own), step=0)
    committed, of_own = drawn(), torch.rand(3, device="cuda", generator=own).tolist()
    state.restore()
    assert drawn() == committed
    assert torch.rand(3, device="cuda", generator=own).tolist() == of_own
    # The last one goes on with the numbers of the one that was selected.
    kept = state.random.state_dict()
    torch.cuda.set_device(count - 1)
    try:
        state.random.load_state_dict(kept)
        last = drawn()
    finally:
        torch.cuda.set_device(selected)
    state.random.load_state_dict(kept)
    first = drawn()
    assert [last[(count - 1 + place) % count] for place in range(count)] == [
        first[(selected + place) % count] for place in range(count)
    ]


def test_numpy_is_there_once_it_has_been_imported(monkeypatch):
    with_numpy = RandomState().state_dict()
    drawn = np.random.rand()
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = RandomState().state_dict()
    assert "numpy" not in state
    monkeypatch.undo()
    then = np.random.get_state()[2]
    RandomState().load_state_dict(state)
    assert np.random.get_state()[2] == then
    RandomState().load_state_dict(with_numpy)
    assert np.random.rand() == drawn


def test_what_is_no_generator_is_refused():
    with pytest.raises(ConfigError, match="argument 1 is a int: pass generators"):
        RandomState(torch.Generator(), 3)
    state = RandomState(*own_generators()).state_dict()
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="of 4 generators of the program, and here it has 1"):
        RandomState(random.Random()).load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)


def seeded_by_rank(per_rank):
    """What this rank draws by itself, and once the state is that of rank 1, and a commit later."""
    rank = bps.rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    own = own_generators(rank)
    # Each on a GPU of its own, and no two machines alike.
    with Gpus(2 + rank, selected=rank) as gpus:
        for _ in range(rank):
            gpus.draw()

        def drawn():
            return draw(own), gpus.draw()[rank]

        by_itself, kept = drawn(), RandomState(*own)
        state = TorchState(random=RandomState(*own, per_rank=per_rank), step=0)
        taken = kept.state_dict()
        next_by_itself = drawn()
        kept.load_state_dict(taken)
        # It has committed, and the others have not.
        state._commits, state._has_state = rank, True
        state.sync()
        synchronized = drawn()
        state.restore()
        assert drawn() == synchronized
    return by_itself, next_by_itself, synchronized


@pytest.mark.parametrize("per_rank", [False, True])
def test_whose_numbers_ranks_go_on_with(pair, per_rank):
    (first, second) = pair.run(seeded_by_rank, per_rank)
    assert first[0] != second[0]
    assert second[2] == second[1]
    assert first[2] == (first[1] if per_rank else second[1])
