# SPDX-License-Identifier: Apache-2.0
"""What, besides token ids, keeps requests apart."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_plugin.engine.bundle_identity import AdapterNames
from hybrid_plugin.tiers.keys import namespace_digest
from hybrid_plugin.vllm import requests
from hybrid_plugin.vllm.adapters import Adapters, LoadedAdapter
from hybrid_plugin.vllm.requests import VllmRequest


def request(**changes: Any) -> Any:
    """The fields of vLLM's request that are read here."""
    fields = {
        "all_token_ids": [5, 6, 7, 8, 9],
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**(fields | changes))


def namespace(**changes: Any) -> Any:
    return VllmRequest(request(**changes)).namespace()


def tokens(**changes: Any) -> list[int]:
    return list(VllmRequest(request(**changes)).tokens())


def image(identifier: str, offset: int, length: int) -> Any:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def lora(name: str) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_path="/p", lora_int_id=1, load_inplace=False
    )


def test_plain_requests_share_one_namespace() -> None:
    assert namespace() is None


def test_adapter_and_salt_are_namespaces() -> None:
    found = [
        namespace(lora_request=lora("a")),
        namespace(lora_request=lora("b")),
        namespace(cache_salt="a"),
        namespace(lora_request=lora("a"), cache_salt="a"),
        namespace(),
    ]
    assert len(set(found)) == len(found)
    assert found[0] == namespace(lora_request=lora("a"))


def test_equal_placeholders_of_other_images_differ() -> None:
    cat = tokens(mm_features=[image("cat", 1, 3)])
    dog = tokens(mm_features=[image("dog", 1, 3)])
    assert cat[0] == dog[0] == 5 and cat[4] == dog[4] == 9
    assert not set(cat[1:4]) & set(dog[1:4])
    assert len(set(cat[1:4])) == 3 and max(cat[1:4]) < 0


def test_an_image_means_the_same_wherever_it_stands() -> None:
    early = tokens(mm_features=[image("cat", 0, 2)])
    late = tokens(mm_features=[image("cat", 3, 2)])
    assert early[:2] == late[3:]


def test_numbers_are_the_same_in_every_process() -> None:
    """They are no table's: equal whatever was seen before, and fixed for good."""
    tokens(mm_features=[image("dog", 1, 3)])
    assert tokens(mm_features=[image("cat", 1, 3)])[1:4] == [
        -3686158003148265520,
        -3686158003148265521,
        -3686158003148265522,
    ]


def test_numbers_fit_into_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_number", lambda identifier: (1 << 63) - 2)
    found = tokens(mm_features=[image("cat", 1, 3)])
    assert list(array("q", found))[1:4] == [-(1 << 63) + 1, -(1 << 63), -1]


@pytest.mark.parametrize("salt", ["", 5, [1], {"a": 1}, True])
def test_a_salt_of_any_type_is_a_namespace(salt: Any) -> None:
    found = namespace(cache_salt=salt)
    assert hash(found) == hash(namespace(cache_salt=salt))
    assert found is not None


def test_tokens_are_a_copy_that_later_ones_do_not_change() -> None:
    plain = request()
    found = VllmRequest(plain).tokens()
    plain.all_token_ids.append(7)
    assert list(found) == [5, 6, 7, 8, 9]


def test_embeddings_are_not_cacheable() -> None:
    assert VllmRequest(request()).cacheable
    assert not VllmRequest(request(prompt_embeds=object())).cacheable


def adapter(path: str, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name="a", lora_path=path, lora_int_id=3, load_inplace=load_inplace
    )


def test_adapters_are_named_after_their_weights_where_names_must_last() -> None:
    known = {"/one": "weights 1", "/copy": "weights 1", "/two": "weights 2"}

    def weights_in(folder: Path) -> str:
        if str(folder) not in known:
            raise FileNotFoundError(folder)
        return known[str(folder)]

    names = Adapters(AdapterNames(weights_in))

    def found(path: str, **more: bool) -> Any:
        one = request(lora_request=adapter(path, **more), cache_salt="s")
        return VllmRequest(one, names).namespace()

    assert found("/one") == found("/copy") == ("weights 1", "s")
    assert found("/two") == ("weights 2", "s")
    assert VllmRequest(request(), names).namespace() is None
    unnamed = [found("some/adapter"), found("/one", load_inplace=True)]
    assert unnamed == [
        (LoadedAdapter("a", "some/adapter", 3, 0), "s"),
        (LoadedAdapter("a", "/one", 3, 0), "s"),
    ]
    for one in unnamed:
        with pytest.raises(TypeError, match="has no name on disk"):
            namespace_digest(one)
    known["/one"] = "weights 3"
    assert found("/one") == ("weights 1", "s"), "it is loaded"
    assert "weights 1" in names.changed(3, in_place=True)
    # Other weights are there: a request that came before names the old path.
    assert found("/one") == (LoadedAdapter("a", "/one", 3, 1), "s")
    assert found("/one", load_inplace=True) not in unnamed
    names.changed(3, in_place=False)
    assert found("/one") == ("weights 3", "s"), "it was removed, and is read again"


def test_an_adapter_shares_with_none_that_was_loaded_otherwise() -> None:
    adapters = Adapters()

    def found(**more: Any) -> Any:
        one = SimpleNamespace(**(vars(adapter("/one")) | more))
        return VllmRequest(request(lora_request=one), adapters).namespace()

    first = found()
    assert found() == first
    others = [found(lora_name="b"), found(lora_path="/two"), found(lora_int_id=4)]
    adapters.changed(3, in_place=True)
    others += [found(), found(load_inplace=True)]
    assert first not in others and len(set(others)) == 4
    assert found() == found(load_inplace=True)
    adapters.changed(3, in_place=True)
    assert found() not in [first, *others]
