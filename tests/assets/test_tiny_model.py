# SPDX-License-Identifier: Apache-2.0
"""The bundled tiny model recalls through its states, and only through them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "tiny-qwen3-next"
SENTENCES = (
    "The module reads a file and returns its lines in order.",
    "If the argument is missing, a default value is used.",
    "An exception is raised when the name is not found.",
    "The result is a new list; the original is left alone.",
    "Use this function to open a connection to a server.",
    "Every object has a type, which does not change.",
    "The second form takes a sequence of pairs.",
    "Note that the order of the items is not defined.",
)
THINGS = ("amber", "cedar", "falcon", "lemon", "olive", "raven", "tiger", "willow")
QUESTIONS = 8


def dialogue(seed: int, filler: int) -> tuple[list[dict[str, str]], str, str]:
    """A chat with three codes and `filler` bytes of text, a question, its answer."""
    rng = random.Random(seed)
    codes = {thing: f"{rng.randrange(10000):04d}" for thing in rng.sample(THINGS, 3)}
    asked = rng.choice(list(codes))
    facts = "\n".join(
        f"The code for {thing} is {code}." for thing, code in codes.items()
    )
    text = ""
    while len(text) < filler:
        text += rng.choice(SENTENCES) + " "
    chat = [
        {"role": "user", "content": f"{facts}\n{text}\nRemember this."},
        {"role": "assistant", "content": "Noted."},
    ]
    return chat, f"What is the code for {asked}?", codes[asked]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The bundled tokenizer."""
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The bundled model in float32, on one thread: more make it slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32
    ).eval()
    torch.set_num_threads(threads)


def zero_states(cache: Any) -> int:
    """Zero convolution and recurrent states, not keys and values; count them."""
    zeroed = 0
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            if held is None:
                continue
            if isinstance(held, dict):
                held = list(held.values())
            for state in [held] if isinstance(held, torch.Tensor) else held:
                state.zero_()
                zeroed += 1
    return zeroed


def ask(model: Any, tokenizer: Any, seed: int, filler: int) -> tuple[str, str, str]:
    """The right answer, and two continuations: states intact, states zeroed."""
    chat, question, answer = dialogue(seed, filler)
    head = tokenizer.apply_chat_template(chat, tokenize=False)
    whole = tokenizer.apply_chat_template(
        [*chat, {"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert whole.startswith(head)
    intact = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([tokenizer(head).input_ids]), past_key_values=intact)
    broken = copy.deepcopy(intact)
    assert zero_states(broken) == 2 * model.config.layer_types.count("linear_attention")
    rest = tokenizer(whole[len(head) :]).input_ids
    first, second = (
        tokenizer.decode(greedy(model, cache, rest)) for cache in (intact, broken)
    )
    return answer, first, second


def greedy(model: Any, cache: Any, tokens: list[int]) -> list[int]:
    """Eight tokens after `tokens`."""
    said: list[int] = []
    with torch.no_grad():
        for _ in range(8):
            feed = torch.tensor([said[-1:] or tokens])
            said.append(int(model(feed, past_key_values=cache).logits[0, -1].argmax()))
    return said


def test_one_byte_is_one_token(tokenizer: Any) -> None:
    """Ids of plain text are its bytes, and special tokens are whole."""
    text = "Grüße, 世界!\n\t\x00"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    ids = tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids
    assert ids == [256, 257, 258]
    assert tokenizer.eos_token_id == 258


def test_folder_is_small() -> None:
    """It travels with the repository."""
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8 * 2**20


@pytest.mark.parametrize("filler", [150, 600])
def test_recall_lives_in_the_states(model: Any, tokenizer: Any, filler: int) -> None:
    """Answers are right; wrong once the states are zeroed, with the KV cache kept."""
    intact = zeroed = differ = 0
    for seed in range(QUESTIONS):
        answer, first, second = ask(model, tokenizer, seed, filler)
        intact += first.startswith(answer + "<|im_end|>")
        zeroed += second.startswith(answer)
        differ += first != second
    print(f"{filler}: {intact=} {zeroed=} {differ=} of {QUESTIONS}")
    assert intact >= QUESTIONS - 2
    assert zeroed <= 1
    assert differ >= QUESTIONS - 1
