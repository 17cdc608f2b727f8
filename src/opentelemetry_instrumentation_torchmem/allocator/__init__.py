# SPDX-License-Identifier: Apache-2.0
"""What torch says of its memory: readings, where they come from, who takes them when.

Nothing in here knows OpenTelemetry.
"""
