# SPDX-License-Identifier: Apache-2.0
"""The pipeline behind the package, run for real: collector, Prometheus, Alertmanager, Jaeger (`make e2e`)."""
