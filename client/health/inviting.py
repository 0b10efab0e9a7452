"""The invitation that the page shows to visitors who have not used its network yet. Pure."""

from collections.abc import Sequence

from dht.errors import UserError
from dht.identity.dialling import Scope, scope_of_given
from dht.networks.invitation import FINGERPRINT_BYTES, Invitation, invitation_to

ADDRESSES_SHOWN_MAX = 2
"""Addresses in the page's own invitation: each command of the page holds it, and is read."""


def page_invitation(
    network: str, entered: Sequence[str], model: str = "", fingerprint: str = ""
) -> Invitation | None:
    """An invitation to the first public ones of the addresses by which the page ``entered``.

    None where none is public: strangers can do nothing with an address of a home or of one machine,
    and need not learn it. A web server before the page may hand it to them even where the page
    itself listens on loopback alone, so this holds there, too.
    """
    public = [each for each in entered if scope_of_given(each) is Scope.PUBLIC]
    known = fingerprint if len(fingerprint) >= 2 * FINGERPRINT_BYTES else ""
    try:
        made = invitation_to(network, public, model, known)
        return invitation_to(network, made.addresses[:ADDRESSES_SHOWN_MAX], model, known)
    except UserError:
        return None
