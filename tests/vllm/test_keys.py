# SPDX-License-Identifier: Apache-2.0
"""What, besides token ids, keeps requests apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
    keys = RequestKeys()
    found = [
        keys.namespace(request(lora_request=lora("a"))),
        keys.namespace(request(lora_request=lora("b"))),
        keys.namespace(request(cache_salt="a")),
        keys.namespace(request(lora_request=lora("a"), cache_salt="a")),
        keys.namespace(request()),
    ]
    assert len(set(found)) == len(found)
    assert found[0] == keys.namespace(request(lora_request=lora("a")))


def test_equal_placeholders_of_other_images_differ() -> None:
    keys = RequestKeys()
    cat = list(keys.tokens(request(mm_features=[image("cat", 1, 3)])))
    dog = list(keys.tokens(request(mm_features=[image("dog", 1, 3)])))
    assert cat[0] == dog[0] == 5 and cat[4] == dog[4] == 9
    assert not set(cat[1:4]) & set(dog[1:4])
    assert len(set(cat[1:4])) == 3 and max(cat[1:4]) < 0


def test_an_image_means_the_same_wherever_it_stands() -> None:
    keys = RequestKeys()
    early = list(keys.tokens(request(mm_features=[image("cat", 0, 2)])))
    late = list(keys.tokens(request(mm_features=[image("cat", 3, 2)])))
    assert early[:2] == late[3:]


def test_tokens_of_a_text_request_are_its_own_list() -> None:
    plain = request()
    assert RequestKeys().tokens(plain) is plain.all_token_ids


def test_embeddings_are_not_cacheable() -> None:
    assert RequestKeys.cacheable(request())
    assert not RequestKeys.cacheable(request(prompt_embeds=object()))
