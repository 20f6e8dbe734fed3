# SPDX-License-Identifier: Apache-2.0
"""The bundled model's MTP head loads, and the model accepts its drafts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402

from tests.assets.mtp_head import MtpHead, accepted  # noqa: E402

FOLDER = Path(__file__).parent / "tiny-qwen3-next"
WEIGHTS = FOLDER / "mtp.safetensors"
PROMPTS = (
    "Return a list of the names in the module. ",
    'def read(self, size=-1):\n    """Read and return up to size bytes',
    "This exception is raised when ",
    "<|im_start|>user\nThe code for amber is 7301.\nThe code for cedar is 4462.\n"
    "What is the code for cedar?<|im_end|>\n<|im_start|>assistant\n",
)
TOKENS = 64
DRAFTS = 3
Case = tuple[list[int], int, Any]
"""A sequence, the length of its prompt, and its hidden states."""


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The bundled model in float32, on one thread: more make it slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32
    ).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def head(model: Any) -> MtpHead:
    """Its head, in float32."""
    head = MtpHead(model).eval()
    head.load(WEIGHTS)
    return head


@pytest.fixture(scope="module")
def cases(model: Any) -> list[Case]:
    """Greedy answers to fixed prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    made = []
    for text in PROMPTS:
        prompt = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            tokens = model.generate(prompt, max_new_tokens=TOKENS, eos_token_id=None)
            hidden = model.model(tokens).last_hidden_state
        made.append((tokens[0].tolist(), prompt.shape[1], hidden))
    return made


def acceptance_length(head: MtpHead, cases: list[Case], drafts: int) -> float:
    """Tokens a verification, on average."""
    counts = []
    for tokens, prompt, hidden in cases:
        drafted = head.drafts(hidden, tokens, prompt, drafts)
        counts += accepted(drafted, tokens, prompt)
    return 1 + sum(counts) / len(counts)


def test_names_are_those_that_engines_load() -> None:
    """Every tensor has the prefix by which engines know a head's tensors."""
    with safe_open(WEIGHTS, "pt") as file:
        names = set(file.keys())
        kinds = {file.get_slice(name).get_dtype() for name in names}
    assert all(name.startswith("mtp.") for name in names)
    assert {"mtp.fc.weight", "mtp.norm.weight"} < names
    assert kinds == {"BF16"}
    assert WEIGHTS.stat().st_size <= 10**6


def test_model_alone_does_not_see_the_head() -> None:
    """transformers loads what the model has and nothing of the head."""
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))


@pytest.mark.parametrize(("drafts", "least"), [(1, 1.5), (2, 1.8), (3, 1.9)])
def test_drafts_are_accepted(
    head: MtpHead, cases: list[Case], drafts: int, least: float
) -> None:
    """More drafts, longer runs."""
    assert acceptance_length(head, cases, drafts) >= least


def test_drafts_need_the_hidden_states(head: MtpHead, cases: list[Case]) -> None:
    """With the hidden state of the token before, hardly a run is accepted."""
    shifted = [
        (tokens, prompt, hidden.roll(1, dims=1)) for tokens, prompt, hidden in cases
    ]
    right = acceptance_length(head, cases, DRAFTS)
    wrong = acceptance_length(head, shifted, DRAFTS)
    assert wrong - 1 < 0.5 * (right - 1)


def test_head_without_a_tensor_is_refused(model: Any, tmp_path: Path) -> None:
    """A missing tensor is an error, not a head that drafts at random."""
    from safetensors.torch import load_file, save_file

    weights = copy.copy(load_file(WEIGHTS))
    del weights["mtp.pre_fc_norm_hidden.weight"]
    save_file(weights, tmp_path / "mtp.safetensors")
    with pytest.raises(RuntimeError, match="pre_fc_norm_hidden"):
        MtpHead(model).load(tmp_path / "mtp.safetensors")
