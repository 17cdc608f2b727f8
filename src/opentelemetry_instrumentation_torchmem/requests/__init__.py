# SPDX-License-Identifier: Apache-2.0
"""What a call did: targets are wrapped, a probe measures each call, and the span tells it."""
