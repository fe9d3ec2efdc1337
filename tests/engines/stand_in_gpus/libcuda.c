/* The functions of NVIDIA's driver that vLLM's extensions name, so that they can be loaded; each says "no device". */
#define ANSWER(name) int name(void) { return 100; }
ANSWER(cuCtxGetCurrent) ANSWER(cuCtxSetCurrent) ANSWER(cuDeviceGetAttribute) ANSWER(cuDevicePrimaryCtxRetain)
ANSWER(cuDriverGetVersion) ANSWER(cuGetErrorString) ANSWER(cuGetProcAddress_v2) ANSWER(cuMemAddressFree)
ANSWER(cuMemAddressReserve) ANSWER(cuMemCreate) ANSWER(cuMemGetAllocationGranularity) ANSWER(cuMemMap)
ANSWER(cuMemRelease) ANSWER(cuMemSetAccess) ANSWER(cuMemUnmap) ANSWER(cuPointerGetAttribute)
ANSWER(cuTensorMapEncodeTiled)
