# SPDX-License-Identifier: Apache-2.0
"""What this package costs, as ratios against floors measured in the same run: ``python -m benchmarks``."""
