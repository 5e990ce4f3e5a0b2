"""Blocks of any shape and stride come back bit by bit."""

import pytest
import torch

from tandem_vllm_storage.block_copies import BlockCopies, LayoutUnknown

BLOCKS = 6


def layer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(size, dtype=torch.int32).to(dtype).view(shape)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(layer(BLOCKS, 3, 4, 2), id="blocks first"),
        pytest.param(layer(2, BLOCKS, 4, 3), id="keys and values first"),
        pytest.param(layer(2 * BLOCKS, 4, 3), id="two kernel blocks in a block"),
        pytest.param(layer(BLOCKS, 4, 3).transpose(1, 2), id="other strides"),
        pytest.param(layer(BLOCKS, 4, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(layer(BLOCKS, 4).to(torch.float8_e4m3fn), id="fp8"),
        pytest.param(layer(3, BLOCKS, 4).movedim(1, 0), id="one allocation for all layers"),
    ],
)
def test_blocks_are_copied_as_they_are(source: torch.Tensor) -> None:
    target = torch.empty_like(source).zero_()
    reader, writer = (BlockCopies({"l": x}, BLOCKS, 2) for x in (source, target))
    assert reader.groups == writer.groups
    [group] = reader.read([1, 4])
    writer.write(group.name, [memoryview(part) for part in group.parts], [1, 4], 0)
    [copied] = writer.read([1, 4])
    assert [bytes(part) for part in copied.parts] == [bytes(part) for part in group.parts]
    [untouched] = writer.read([0, 5])
    assert not any(b"".join(bytes(part) for part in untouched.parts))


def test_blocks_that_are_shared_are_left_alone() -> None:
    source, target = layer(BLOCKS, 4), torch.zeros(BLOCKS, 4)
    [group] = BlockCopies({"l": source}, BLOCKS, 2).read([2, 3])
    parts = [memoryview(part) for part in group.parts]
    BlockCopies({"l": target}, BLOCKS, 2).write(group.name, parts, [0, 1], 1)
    assert (target[0] == 0).all()
    assert (target[1] == source[3]).all()


def test_strides_are_a_part_of_the_layout() -> None:
    straight = BlockCopies({"l": layer(BLOCKS, 4, 4)}, BLOCKS, 2)
    turned = BlockCopies({"l": layer(BLOCKS, 4, 4).transpose(1, 2)}, BLOCKS, 2)
    assert straight.layout != turned.layout


def test_a_layer_without_blocks_is_refused() -> None:
    with pytest.raises(LayoutUnknown, match=r"layer l has the shape \(5, 7\)"):
        BlockCopies({"l": layer(5, 7)}, BLOCKS, 2)
