/* SPDX-License-Identifier: Apache-2.0
 *
 * cuDNN is not emulated. PyTorch has kernels of its own for all that it would use cuDNN for and takes them where
 * the user switched cuDNN off (torch.backends.cudnn.enabled = False): here it always is, so that programs which
 * do not know of the emulation run unchanged. */
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))

/* at::Context::userEnabledCuDNN() const */
EXPORT bool _ZNK2at7Context16userEnabledCuDNNEv(const void *context) { return (void)context, false; }

/* at::Context::userEnabledCuDNNSDP() const: attention */
EXPORT bool _ZNK2at7Context19userEnabledCuDNNSDPEv(const void *context) { return (void)context, false; }
