# SPDX-License-Identifier: Apache-2.0
"""What, besides token ids, keeps requests apart."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_plugin.vllm import keys
from hybrid_plugin.vllm.keys import RequestKeys


def request(**changes: Any) -> Any:
    """The fields of vLLM's request that the keys read."""
    fields = {
        "all_token_ids": [5, 6, 7, 8, 9],
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**(fields | changes))


def image(identifier: str, offset: int, length: int) -> Any:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def lora(name: str) -> Any:
    return SimpleNamespace(lora_name=name)


def test_plain_requests_share_one_namespace() -> None:
    assert RequestKeys().namespace(request()) is None


def test_adapter_and_salt_are_namespaces() -> None:
    known = RequestKeys()
    found = [
        known.namespace(request(lora_request=lora("a"))),
        known.namespace(request(lora_request=lora("b"))),
        known.namespace(request(cache_salt="a")),
        known.namespace(request(lora_request=lora("a"), cache_salt="a")),
        known.namespace(request()),
    ]
    assert len(set(found)) == len(found)
    assert found[0] == known.namespace(request(lora_request=lora("a")))


def test_equal_placeholders_of_other_images_differ() -> None:
    known = RequestKeys()
    cat = list(known.tokens(request(mm_features=[image("cat", 1, 3)])))
    dog = list(known.tokens(request(mm_features=[image("dog", 1, 3)])))
    assert cat[0] == dog[0] == 5 and cat[4] == dog[4] == 9
    assert not set(cat[1:4]) & set(dog[1:4])
    assert len(set(cat[1:4])) == 3 and max(cat[1:4]) < 0


def test_an_image_means_the_same_wherever_it_stands() -> None:
    known = RequestKeys()
    early = list(known.tokens(request(mm_features=[image("cat", 0, 2)])))
    late = list(known.tokens(request(mm_features=[image("cat", 3, 2)])))
    assert early[:2] == late[3:]


def test_numbers_are_the_same_in_every_process() -> None:
    """They are no table's: equal whatever was seen before, and fixed for good."""
    fresh, used = RequestKeys(), RequestKeys()
    used.tokens(request(mm_features=[image("dog", 1, 3)]))
    cat = request(mm_features=[image("cat", 1, 3)])
    assert list(fresh.tokens(cat)) == list(used.tokens(cat))
    assert list(fresh.tokens(cat))[1:4] == [
        -3686158003148265520,
        -3686158003148265521,
        -3686158003148265522,
    ]
    assert not vars(used)


def test_numbers_fit_into_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_number", lambda identifier: (1 << 63) - 2)
    found = RequestKeys().tokens(request(mm_features=[image("cat", 1, 3)]))
    assert list(array("q", found))[1:4] == [-(1 << 63) + 1, -(1 << 63), -1]


@pytest.mark.parametrize("salt", ["", 5, [1], {"a": 1}, True])
def test_a_salt_of_any_type_is_a_namespace(salt: Any) -> None:
    found = RequestKeys().namespace(request(cache_salt=salt))
    assert hash(found) == hash(RequestKeys().namespace(request(cache_salt=salt)))
    assert found is not None


def test_tokens_of_a_text_request_are_its_own_list() -> None:
    plain = request()
    assert RequestKeys().tokens(plain) is plain.all_token_ids


def test_embeddings_are_not_cacheable() -> None:
    assert RequestKeys.cacheable(request())
    assert not RequestKeys.cacheable(request(prompt_embeds=object()))
