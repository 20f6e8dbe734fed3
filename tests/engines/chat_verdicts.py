# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the answers of `chats_vllm`, as far as rounding lets one say."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hybrid_plugin.core.commands import CHUNK
from tests.engines.chats_vllm import (
    ANSWER,
    CROWD_ANSWER,
    ON_GPU,
    SHARED,
    WRONG,
    Asked,
    Found,
    Setup,
)
from tests.engines.compare import compare
from tests.engines.messages import Answer
from tests.engines.phases import report

RIGHT = (
    *("first", "second", "third", "shared", "crowd", "crowd again", "first again"),
    *("long", "long again"),
)


def apart(first: Answer, second: Answer) -> float:
    """Nats between what two engines say of the first token behind a prompt, at most.

    Of the tokens that both have among their likeliest.
    """
    one, other = first.logprobs[0], second.logprobs[0]
    return max((abs(one[t] - other[t]) for t in one.keys() & other.keys()), default=9.0)


def without_numbers(answers: Sequence[Answer]) -> int:
    """How many answers have first tokens whose logprobs are no numbers."""
    return sum(any(map(math.isnan, one.logprobs[0].values())) for one in answers)


def judge(reference: Sequence[Answer], answers: Sequence[Answer]) -> Found:
    """How far answers are from the reference's."""
    found = compare(reference, answers, 0.0)
    return {
        "differing": found.differing,
        "worst_gap": min(found.worst_gap, 99.0),
        "apart": max(map(apart, reference, answers)),
        "without_numbers": without_numbers(answers),
        "wrong": list(found.wrong),
    }


def judged(one: Asked, stock: Sequence[Answer], own: Sequence[Answer]) -> Found:
    """How far the answers of a phase are from stock's.

    Args:
        one: phase.
        stock: what vLLM answers without a cache.
        own: the same, computed otherwise: how far vLLM is from itself.
    """
    return judge(stock, one.answers) | {
        "cached": [answer.cached_tokens for answer in one.answers],
        "prompts": [len(prompt) for prompt in one.prompts],
        "noise": judge(stock, own),
    }


def described(result: Found) -> str:
    """What came of a phase, for a reader."""
    noise = result["noise"]
    return (
        f"first token {result['apart']:.3f} nats from stock (vLLM's own: "
        f"{noise['apart']:.3f}); {result['differing']} of {len(result['cached'])} "
        f"answers part, at worst {result['worst_gap']:.3f} nats (own: "
        f"{noise['differing']}, {noise['worst_gap']:.3f}); without numbers "
        f"{result['without_numbers']} (own: {noise['without_numbers']}); restored "
        f"{result['cached']} of {result['prompts']}"
    )


def problems(setup: Setup, found: Found, ranks: int) -> list[str]:
    """What is wrong with what an engine answered and restored, a phrase each.

    Answers may be as far from stock's as those without hits are, and as vLLM's own are
    from each other (`noise`), with a margin.

    Args:
        setup: of the engine.
        found: what came of it.
        ranks: that share out the rows of a page.
    """
    if "error" in found:
        return [found["error"]]
    phases = found["phases"]
    noise = max(
        phases["first"]["apart"], *(p["noise"]["apart"] for p in phases.values())
    )
    own = max(p["noise"]["worst_gap"] for p in phases.values())
    bounds = {"apart": 2.5 * noise + 0.05, "worst_gap": min(2.5 * own, 0.3) + 0.2}
    wrong = [
        f"{phase}: {measure} is {phases[phase][measure]:.3f}, not below {bound:.3f}"
        for phase in RIGHT
        for measure, bound in bounds.items()
        if phase in phases and not phases[phase][measure] < bound
    ]
    wrong += [
        f"{phase}: apart is {phases[phase]['apart']:.3f}, and would pass for right"
        for phase in (WRONG if setup.tells_pages else WRONG[:1])
        if phase in phases and phases[phase]["apart"] < bounds["apart"]
    ]
    if found["page_size"] != found["rows"] * ranks:
        wrong.append(f"{found['rows']} rows are no page of {found['page_size']} tokens")
    if found["capacity"] != (found["pages"] - 1) * found["page_size"]:
        wrong.append(f"{found['pages']} pages hold no {found['capacity']} tokens")
    if any(found["used"].values()):
        wrong.append(f"pools lend to nobody: {found['used']}")
    tells = _forgotten_problems if setup.forgets else _hit_problems
    return wrong + list(tells(found))


def _hit_problems(found: Found) -> Iterator[str]:
    """Of how much was restored: all but the last token of each answer."""
    before = {"second": "first", "third": "second", "crowd again": "crowd"}
    for phase, first in before.items():
        answer = CROWD_ANSWER if first == "crowd" else ANSWER
        whole = [length + answer - 1 for length in found["phases"][first]["prompts"]]
        cached = found["phases"][phase]["cached"]
        if cached != whole:
            yield f"{phase}: {cached} tokens were restored, of {whole}"
    # Kernels that keep states inside a pass do so at the ends of their chunks.
    inside = found["stats"]["interior_snapshots"] > 0
    step = CHUNK if inside else found["page_size"]
    *_, shared = found["phases"]["shared"]["cached"]
    if shared != SHARED // step * step:
        yield f"shared: {shared} tokens were restored, of {SHARED}"
    if not found["stats"]["preemptions"]:
        yield "crowd: nobody was preempted"


def _forgotten_problems(found: Found) -> Iterator[str]:
    """Of what came from the host."""
    second, stats = found["phases"]["second"], found["stats"]
    if sum(second["cached"]) < 0.7 * sum(second["prompts"]):
        yield f"second: {sum(second['cached'])} tokens of {sum(second['prompts'])}"
    if ON_GPU and not stats["host_hit_tokens"] > 0.2 * stats["hit_tokens"]:
        yield f"the host gave {stats['host_hit_tokens']} of {stats['hit_tokens']}"


def reported(
    setups: Mapping[str, Setup],
    found: Mapping[str, Found],
    ranks: int,
    more: Callable[[Found], Iterable[str]] = lambda _: (),
) -> int:
    """Say what is wrong with each engine, and print all as a line of JSON.

    Args:
        setups: by name.
        found: what came of each.
        ranks: as in `problems`.
        more: says what is wrong besides, a phrase each.

    Returns:
        1 if something is wrong, 0 otherwise.
    """
    for name, setup in setups.items():
        wrong = [*problems(setup, found[name], ranks), *more(found[name])]
        found[name]["wrong"] = wrong
        for one in found[name]["wrong"]:
            say(f"{name} IS WRONG: {one}")
        if not found[name]["wrong"]:
            say(f"{name} is right.")
    report(found)
    return int(any(one["wrong"] for one in found.values()))


def say(line: str) -> None:
    """For who watches: what is found goes to standard output."""
    print(line, file=sys.stderr, flush=True)
