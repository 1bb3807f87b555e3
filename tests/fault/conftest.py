"""A small run that the tests of this folder break."""

import os
import random

import pytest

from fault_runs import CONFIG


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with run.toml and its text; prepared text goes into a cache of its own beside them."""
    folder = tmp_path_factory.mktemp("fault")
    words = random.Random(1).choices("federated sharded data parallel training of large models".split(), k=1000)
    (folder / "train.txt").write_text(" ".join(words))
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    yield folder
    patch.undo()


@pytest.fixture
def moments():
    """Random numbers for the test; pytest shows the seed where it fails, and with that the numbers are the same."""
    seed = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"FAULT_SEED={seed}")
    return random.Random(seed)
