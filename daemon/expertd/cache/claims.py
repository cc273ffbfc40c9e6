"""Claims: what a session may ask for, and whether it has claimed more than it may hold.

Everything here comes from a worker and may be hostile: requests, wishes, and the words of its page.
"""

from __future__ import annotations

from expertd.cache.hazards import count_held
from expertd.cache.requests import Holder
from expertd_protocol.errors import ProtocolError, QuotaExceeded, TooManyInFlight
from expertd_protocol.layout import check_range, word_slabs, word_slots
from expertd_protocol.messages import Miss, Wish


def check_ids(asked: Miss | Wish, shape: tuple[int, ...]) -> None:
    """Raise `ProtocolError` unless a model of `shape` [layers, experts] has what is asked for."""
    layers, experts = shape
    check_range("layer", asked.layer, 0, layers)
    for expert in asked.experts:
        check_range("expert", expert, 0, experts)


def check_request(
    request: Miss, holder: Holder, shape: tuple[int, ...], max_in_flight: int
) -> None:
    """Raise `ProtocolError` unless the session may make this request now (rule 2)."""
    check_ids(request, shape)
    if len(set(request.experts)) != len(request.experts):
        raise ProtocolError(f"an expert stands twice in request {request.seq}")
    if request.seq <= holder.seq:  # else older grants would never end
        raise ProtocolError(f"request {request.seq} came after {holder.seq}; numbers only grow")
    if len(holder.waiting) >= max_in_flight:
        raise TooManyInFlight(
            f"{len(holder.waiting)} requests of this session wait already, {max_in_flight} may"
        )
    asked = sum(len(w.request.experts) for w in holder.waiting.values())
    held = min(count_held(holder.hazards), holder.quota)
    if held + asked + len(request.experts) > holder.quota:
        raise QuotaExceeded(
            f"{len(request.experts)} experts asked for with {held} held and {asked} waited for; "
            f"the session's quota is {holder.quota}"
        )


def claims_too_much(holder: Holder) -> bool:
    """Tell whether hazards, grants and requests name more experts than the quota: a hostile page.

    An honest worker passes its quota with requests it has given up, and with grants that it
    acknowledged after we looked; neither is worth anything to it.
    """
    granted = [g for _, slots in holder.grants for g in slots]
    granted += [g for w in holder.waiting.values() for g in w.granted]
    missing = sum(len(w.missing) for w in holder.waiting.values())
    hazards = holder.hazards[holder.hazards != 0]
    if len(granted) + missing + len(hazards) <= holder.quota:
        return False
    named = zip(word_slabs(hazards).tolist(), word_slots(hazards).tolist(), strict=True)
    return len({*granted, *named}) + missing > holder.quota
