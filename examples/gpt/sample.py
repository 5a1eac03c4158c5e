"""Text drawn from a trained model, byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor

import engine
from engine.device import stream_seed


def sample_text(
    step: engine.TrainStep,
    mesh: engine.Mesh,
    prompt: str,
    *,
    rows: int,
    new_bytes: int,
    sequence: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Return `rows` texts that start with `prompt` and go on for `new_bytes` bytes drawn from the model.

    All ranks of a data rank must call it together and get the same texts; other data ranks need not. The model sees
    the last `sequence` bytes.
    """
    # Every rank draws from an equal generator and equal logits, so all agree on the next byte without sending it.
    generator = torch.Generator().manual_seed(stream_seed("sample", seed))
    start = torch.tensor(list(prompt.encode()))
    texts = start.repeat(rows, 1)  # (rows, bytes so far)
    for _ in range(new_bytes):
        logits = next_logits(step, mesh, texts[:, -sequence:], sequence)
        probabilities = (logits.float() / temperature).softmax(dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        texts = torch.cat([texts, drawn], dim=1)
    return [bytes(text.tolist()).decode(errors="replace") for text in texts]


def next_logits(step: engine.TrainStep, mesh: engine.Mesh, seen: Tensor, sequence: int) -> Tensor:
    """Return the logits (rows, 256) of the byte after `seen` (rows, bytes), on the CPU. At most `sequence` bytes."""
    last = seen.shape[1] - 1
    # Always the full width: attention is causal, so what stands after the last byte cannot change its logits.
    inputs = torch.nn.functional.pad(seen, (0, sequence - seen.shape[1]))
    shard = step.predict(inputs)[:, last].contiguous()  # (rows, vocabulary / tensor)
    return mesh.tensor.all_gather(shard, dim=-1)[:, :256].cpu()
