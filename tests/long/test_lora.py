"""LoRA with every model, strategy, kind of recomputation and dtype of what is frozen."""

import pytest

from tests.fsdp.test_lora import EVERY, check_bits
from tests.worlds import KINDS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_lora_gives_the_bits_of_one_process_in_every_world(kind: str) -> None:
    check_bits(kind, EVERY)
