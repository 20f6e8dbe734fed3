# SPDX-License-Identifier: Apache-2.0
"""Requests to servers of this machine.

Each of httpx's own functions makes a client for one request, which reads all
certificates that the environment names: longer than most requests take, and nothing
here is encrypted.
"""

from __future__ import annotations

import httpx

# A server may close a connection that waits just when it is used again.
_CLIENT = httpx.Client(
    verify=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)

get = _CLIENT.get
post = _CLIENT.post
request = _CLIENT.request
