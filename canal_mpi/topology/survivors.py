"""What is left of the exchange when agents have died: edges among the living, lessons they hold."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from canal_mpi.columns import decode, encode
from canal_mpi.schema import ROWS_LIMIT
from canal_mpi.state import inside, under
from canal_mpi.topology.desk import Heard
from canal_mpi.topology.graphs import Edges, edges, is_file
from canal_mpi.topology.offers import columns_to_offers, offers_to_columns
from canal_mpi.types import Columns, Key, Offer

Known = tuple[list[Offer], list[Key]]  # offers that an agent knows of, lessons that it holds


def edges_among(
    living: Sequence[int], topology: str, before: Edges, seed: int, hosts: Sequence[str]
) -> Edges:
    """The same topology with fewer agents; of a file, or a function, the edges that are left."""
    if is_file(topology) or (":" in topology and not topology.startswith("random:")):
        return {(a, b) for a, b in before if a in living and b in living}
    places = edges(topology, len(living), seed, hosts)
    return {(living[a], living[b]) for a, b in places}


def pack_known(known: Known) -> bytes:
    """What an agent knows, as a message."""
    offers, held = known
    keys = np.array(held, dtype="<i4").reshape(-1, 2)
    return encode(under("offers", offers_to_columns(offers)) | {"held": keys})


def merged(known: Mapping[int, bytes]) -> list[Heard]:
    """Every lesson that somebody holds, with its holder: the donor if possible."""
    offers: dict[Key, Offer] = {}
    holders: dict[Key, set[int]] = {}
    for agent, message in sorted(known.items()):
        columns = decode(message, ROWS_LIMIT)
        offers |= {offer.key: offer for offer in columns_to_offers(inside("offers", columns))}
        for donor, round_ in columns["held"].tolist():
            holders.setdefault((donor, round_), set()).add(agent)
    return [Heard(offers[k], _holder(k, holders[k])) for k in sorted(offers) if k in holders]


def _holder(key: Key, agents: Iterable[int]) -> int:
    return key[0] if key[0] in agents else min(agents)


def pack_merged(found: Sequence[Heard]) -> bytes:
    """The lessons that are left and who holds them, as a message."""
    holders = np.array([heard.via for heard in found], dtype="<i4")
    columns: Columns = under("offers", offers_to_columns([heard.offer for heard in found]))
    return encode(columns | {"holders": holders})


def unpack_merged(message: bytes) -> list[Heard]:
    """The same, from a message."""
    columns = decode(message, ROWS_LIMIT)
    offers = columns_to_offers(inside("offers", columns))
    return [Heard(o, h) for o, h in zip(offers, columns["holders"].tolist(), strict=True)]
