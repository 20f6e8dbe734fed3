# SPDX-License-Identifier: Apache-2.0
"""What a model is called on disk and among peers, in the same words in every engine.

Two servers find each other's bundles if everything here is equal.  An engine's own view
of a model differs from one engine to the next (classes, defaults, names of layers), so
nothing of it is used where the model's files say the same.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import try_to_load_from_cache

from hybrid_plugin.config import ConfigError, DiskOptions
from hybrid_plugin.core.memory.attention_windows import AttentionWindow
from hybrid_plugin.tiers.identity import config_digest, weights_of

CONFIG_FILE = "config.json"
DUMMY = "dummy"
"""What both engines call weights that are not loaded but made up."""

_SAYS_NOTHING = ("_name_or_path", "transformers_version")
"""Entries of a configuration that change nothing in a model."""
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
"""A number between the dots of a module's name."""


class NamesWeights(Protocol):
    """An option that may name the model's weights, for which the user answers then."""

    @property
    def option(self) -> str:
        """What it is called."""

    @property
    def weights(self) -> str | None:
        """The name; None if they are told by their files."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are on this machine."""

    name: str
    """As the user gave it."""
    folder: Path
    option: str = DiskOptions.option
    """Which needs to know."""

    @classmethod
    def find(
        cls, name: str, revision: str | None = None, option: str = DiskOptions.option
    ) -> ModelFiles:
        """Find a model that the engine has loaded: a folder, or in the hub's cache.

        Args:
            name: a folder, or a name on the hub.
            revision: on the hub.
            option: which needs to know.

        Raises:
            ConfigError: if it is neither, or has no configuration.
        """
        folder = Path(name)
        if not folder.is_dir():
            cached = try_to_load_from_cache(name, CONFIG_FILE, revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else folder
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{option} needs the {CONFIG_FILE} of {name} on this machine, to tell "
                f"the model from others: give the model as a folder, or leave {option} "
                "out."
            )
        return cls(name, folder, option)

    def configuration(self) -> dict[str, Any]:
        """What the model's configuration says about it.

        Raises:
            ConfigError: if it is no JSON object.
        """
        try:
            read = json.loads((self.folder / CONFIG_FILE).read_text())
            entries = dict(read.items())
        except (ValueError, AttributeError, OSError) as error:
            raise ConfigError(
                f"{self.option} cannot read the {CONFIG_FILE} of {self.name} "
                f"({error}): leave {self.option} out."
            ) from error
        return {key: entries[key] for key in entries if key not in _SAYS_NOTHING}


def unnamed_dummies(option: str) -> str:
    """A sentence about dummy weights without a name."""
    return (
        f"{option} cannot tell dummy weights from others: name them in "
        f"{option}.weights, or leave {option} out."
    )


def weights_name(given: NamesWeights, files: ModelFiles, load_format: str) -> str:
    """`Identity.weights` of a model.

    Args:
        given: the option.
        files: of the model.
        load_format: how the engine loads weights, in its words.

    Raises:
        ConfigError: for weights that no file tells from others.
    """
    if given.weights is not None:
        return f"name {given.weights}"
    if load_format == DUMMY:
        raise ConfigError(unnamed_dummies(given.option))
    try:
        return weights_of(files.folder)
    except OSError as error:
        raise ConfigError(
            f"{given.option} cannot tell the weights of {files.name} from others "
            f"({error}): name them in {given.option}.weights, or leave {given.option} "
            "out."
        ) from error


def model_digest(
    files: ModelFiles,
    overrides: Mapping[str, Any],
    dtype: str,
    quantization: str | None,
) -> str:
    """`Identity.config` of a model.

    Args:
        files: of the model.
        overrides: what the user changed of its configuration.
        dtype: in which it computes, by PyTorch's name without "torch.".
        quantization: of its weights; None where the engine names none.
    """
    return config_digest(
        {
            "model": files.configuration(),
            "overrides": dict(overrides),
            "dtype": dtype,
            "quantization": quantization,
        }
    )


def layer_labels(names: Iterable[str]) -> dict[str, str]:
    """Short names of layers of one kind, in which engines agree: their numbers.

    A layer whose number is not plain, or is that of another one too, keeps the name
    that the engine has for it: then only that engine finds what it has stored.

    Args:
        names: of the layers' modules, such as `"model.layers.3.self_attn.attn"`.
    """
    names = list(names)
    numbers = {name: _NUMBER.findall(name) for name in names}
    count = Counter(tuple(found) for found in numbers.values())
    return {
        name: found[0] if len(found) == 1 == count[tuple(found)] else name
        for name, found in numbers.items()
    }


def attention_layer(
    label: str, window: AttentionWindow, *, latent: bool = False
) -> str:
    """An entry of `Identity.layers` for a layer with attention.

    Args:
        label: of the layer.
        window: how far back it sees.
        latent: whether it keeps a latent vector in place of keys and values.
    """
    return f"{label} {'latent ' if latent else ''}{window}"


def state_layer(label: str) -> str:
    """An entry of `Identity.layers` for a layer with a state; its kind is in the
    model's configuration."""
    return f"{label} state"


def in_order(layers: Iterable[str]) -> tuple[str, ...]:
    """`Identity.layers`, in an order that does not depend on the engine."""
    return tuple(sorted(layers))


def adapter_of(folder: Path) -> str:
    """A name for an adapter: its weights, and how they are scaled and where they go.

    Raises:
        OSError: if either is not there.
    """
    config = (folder / "adapter_config.json").read_bytes()
    return f"{weights_of(folder)} {sha256(config).hexdigest()}"


class AdapterNames:
    """Names of adapters that stand for the same weights for as long as files are kept.

    An engine's own names do not: a server may be started with other weights under them.
    """

    def __init__(self, find: Callable[[Path], str] = adapter_of) -> None:
        """Start without adapters.

        Args:
            find: a name for what is in a folder; raises OSError for one without.
        """
        self._find = find
        self._known: dict[tuple[str, Hashable], str | None] = {}

    def of(self, path: str, loading: Hashable = None) -> str | None:
        """The name of an adapter; None if its weights cannot be told from others.

        Args:
            path: of the adapter's folder.
            loading: tells one time that it was loaded from another, where files may
                have changed in between.
        """
        key = path, loading
        if key not in self._known:
            try:
                self._known[key] = self._find(Path(path))
            except OSError:
                self._known[key] = None
        return self._known[key]
