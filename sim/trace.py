"""Traces in Mooncake's format, one JSON object a line: timestamp (ms), input_length, output_length, hash_ids.

hash_ids name the 512-token blocks of the prompt, each one together with all before it. Published with the Mooncake
paper (FAST '25): https://github.com/kvcache-ai/Mooncake, directory FAST25-release/traces (Apache-2.0).
"""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Final

from sim.transcript import Transcript
from sim.turn import Turn
from sim.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_TOKENS: Final = 512


def read(path: Path, speedup: float = 1.0, seed: int = 0) -> Workload:
    """A trace as a workload, `speedup` times as fast as it was recorded.

    Timestamps may be rounded (Mooncake's conversation trace: to 3 s), which would make bursts that never were: the
    arrivals with one timestamp are spread evenly at random up to the next. Raises ValueError that names the line.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                rows.append(
                    (float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), row["hash_ids"])
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
    if not rows:
        raise ValueError(f"{path} holds no requests")
    rng = random.Random(seed)
    times = sorted({row[0] for row in rows})
    widths = {at: later - at for at, later in itertools.pairwise(times)}
    turns = []
    for at_ms, prompt_tokens, output_tokens, hash_ids in rows:
        transcript = Transcript(BLOCK_TOKENS)
        left = prompt_tokens
        for hash_id in hash_ids:
            transcript.append(hash_id, min(left, BLOCK_TOKENS))
            left -= min(left, BLOCK_TOKENS)
        at_s = (at_ms - times[0] + rng.random() * widths.get(at_ms, 0.0)) / 1000 / speedup
        turns.append(Turn(at_s, prompt_tokens, max(1, output_tokens), transcript.blocks, transcript.features()))
    turns.sort(key=lambda turn: turn.at_s)
    return Workload(path.stem, BLOCK_TOKENS, turns)
