/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of the driver that PyTorch insists on finding. Without cuda.h, whose declarations differ between
 * versions: what is not emulated says so whatever it is given. */

#define EXPORT __attribute__((visibility("default")))
#define NOT_SUPPORTED(name) \
    EXPORT int name(void) { return 801; }
#define NOTHING(name) \
    EXPORT int name(void) { return 0; }
#define HANDLE(name)               \
    EXPORT int name(void **out) {  \
        static char handle;        \
        *out = &handle;            \
        return 0;                  \
    }

/* memory shared between processes or devices */
NOT_SUPPORTED(cuMemExportToShareableHandle)
NOT_SUPPORTED(cuMemImportFromShareableHandle)
NOT_SUPPORTED(cuMulticastCreate)
NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem)
NOT_SUPPORTED(cuMulticastUnbind)
NOT_SUPPORTED(cuStreamWriteValue32)
NOT_SUPPORTED(cuStreamWriteValue32_v2)

/* green contexts, driver logs */
NOT_SUPPORTED(cuGreenCtxCreate)
NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxStreamCreate)
NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuDeviceGetDevResource)
NOT_SUPPORTED(cuDevResourceGenerateDesc)
NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuLogsRegisterCallback)
NOT_SUPPORTED(cuLogsUnregisterCallback)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)

/* kernels compiled at run time: loaded, launched, and nothing is done */
HANDLE(cuModuleLoad)
HANDLE(cuModuleLoadData)
HANDLE(cuModuleLoadDataEx)
HANDLE(cuModuleGetFunction)
NOTHING(cuModuleUnload)
NOTHING(cuLaunchKernel)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
