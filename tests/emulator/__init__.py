# SPDX-License-Identifier: Apache-2.0
"""An emulated CUDA runtime on which PyTorch's real caching allocator runs without a GPU: see README.md."""
