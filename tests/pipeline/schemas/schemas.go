// SPDX-License-Identifier: Apache-2.0

// Package schemas pins the types that controller-gen makes the schemas of PrometheusRule and ServiceMonitor from.
package schemas

import _ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
