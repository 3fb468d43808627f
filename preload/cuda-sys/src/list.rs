//! The list of all driver functions that the gate holds, by class.
//!
//! The list contains all names to which CUDA 13's headers can make a program refer, including old
//! versions and variants for per-thread default streams. The preload library exports each of them,
//! because a program that is linked against libcuda needs these symbols. Functions that the gate
//! passes are not listed: see [`crate::hook::passes`]. Names are sorted within their class.

/// Calls a macro with the list of functions, in the form `Class { name … } …`.
#[macro_export]
macro_rules! hooked_functions {
    ($callback:ident) => {
        $callback! {
            Work {
                cuArray3DGetDescriptor cuArray3DGetDescriptor_v2 cuArrayDestroy cuArrayGetDescriptor
                cuArrayGetDescriptor_v2 cuArrayGetMemoryRequirements cuArrayGetPlane
                cuArrayGetSparseProperties cuCoredumpDeregisterCompleteCallback
                cuCoredumpDeregisterStartCallback cuCoredumpGetAttribute
                cuCoredumpGetAttributeGlobal cuCoredumpRegisterCompleteCallback
                cuCoredumpRegisterStartCallback cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal
                cuCtxDisablePeerAccess cuCtxGetApiVersion
                cuCtxGetCacheConfig cuCtxGetDevResource cuCtxGetExecAffinity cuCtxGetFlags
                cuCtxGetId cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange
                cuCtxRecordEvent cuCtxResetPersistingL2Cache cuCtxSetCacheConfig cuCtxSetFlags
                cuCtxSetSharedMemConfig cuCtxWaitEvent cuDestroyExternalMemory
                cuDestroyExternalSemaphore cuDevResourceGenerateDesc cuDevSmResourceSplit
                cuDevSmResourceSplitByCount cuDeviceCanAccessPeer cuDeviceGetByPCIBusId
                cuDeviceGetCliqueCount cuDeviceGetCliqueInfo cuDeviceGetDefaultMemPool
                cuDeviceGetDevResource cuDeviceGetExecAffinitySupport cuDeviceGetFabricClusterUuid
                cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid
                cuDeviceGetMemPool cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities
                cuDeviceGetP2PAttribute cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth
                cuDeviceGraphMemTrim cuDevicePrimaryCtxGetState cuDevicePrimaryCtxSetFlags
                cuDevicePrimaryCtxSetFlags_v2 cuDeviceRegisterAsyncNotification
                cuDeviceSetGraphMemAttribute cuDeviceSetMemPool cuDeviceUnregisterAsyncNotification
                cuEventCreate cuEventDestroy cuEventDestroy_v2 cuEventElapsedTime
                cuEventElapsedTime_v2 cuEventRecord cuEventRecordWithFlags
                cuEventRecordWithFlags_ptsz cuEventRecord_ptsz cuExternalMemoryGetMappedBuffer
                cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites
                cuFuncGetAttribute cuFuncGetModule cuFuncGetName cuFuncGetParamCount
                cuFuncGetParamInfo cuFuncIsLoaded cuFuncSetAttribute cuFuncSetBlockShape
                cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGLGetDevices
                cuGLGetDevices_v2 cuGLMapBufferObject cuGLMapBufferObjectAsync
                cuGLMapBufferObjectAsync_v2 cuGLMapBufferObjectAsync_v2_ptsz cuGLMapBufferObject_v2
                cuGLMapBufferObject_v2_ptds cuGLSetBufferObjectMapFlags cuGLUnmapBufferObject
                cuGLUnmapBufferObjectAsync cuGLUnregisterBufferObject cuGraphAddBatchMemOpNode
                cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddDependencies_v2
                cuGraphAddEmptyNode cuGraphAddEventRecordNode cuGraphAddEventWaitNode
                cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
                cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddKernelNode_v2
                cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode
                cuGraphAddMemsetNode cuGraphAddNode cuGraphAddNode_v2 cuGraphAddNode_v3
                cuGraphBatchMemOpNodeGetParams cuGraphBatchMemOpNodeSetParams
                cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphConditionalHandleCreate
                cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphDestroyNode
                cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent
                cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent
                cuGraphExecBatchMemOpNodeSetParams cuGraphExecChildGraphNodeSetParams
                cuGraphExecDestroy cuGraphExecEventRecordNodeSetEvent
                cuGraphExecEventWaitNodeSetEvent cuGraphExecExternalSemaphoresSignalNodeSetParams
                cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExecGetFlags cuGraphExecGetId
                cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams
                cuGraphExecKernelNodeSetParams_v2 cuGraphExecMemcpyNodeSetParams
                cuGraphExecMemsetNodeSetParams cuGraphExecNodeSetParams cuGraphExecUpdate
                cuGraphExecUpdate_v2 cuGraphExternalSemaphoresSignalNodeGetParams
                cuGraphExternalSemaphoresSignalNodeSetParams
                cuGraphExternalSemaphoresWaitNodeGetParams
                cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges cuGraphGetEdges_v2
                cuGraphGetId cuGraphGetNodes cuGraphGetRootNodes cuGraphHostNodeGetParams
                cuGraphHostNodeSetParams cuGraphKernelNodeCopyAttributes
                cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
                cuGraphKernelNodeGetParams_v2 cuGraphKernelNodeSetAttribute
                cuGraphKernelNodeSetParams cuGraphKernelNodeSetParams_v2
                cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams
                cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams
                cuGraphNodeFindInClone cuGraphNodeGetContainingGraph cuGraphNodeGetDependencies
                cuGraphNodeGetDependencies_v2 cuGraphNodeGetDependentNodes
                cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled cuGraphNodeGetLocalId
                cuGraphNodeGetParams cuGraphNodeGetToolsId cuGraphNodeGetType cuGraphNodeSetEnabled
                cuGraphNodeSetParams cuGraphNodeSetParams_v2 cuGraphReleaseUserObject
                cuGraphRemoveDependencies cuGraphRemoveDependencies_v2 cuGraphRetainUserObject
                cuGraphicsMapResources cuGraphicsMapResources_ptsz
                cuGraphicsResourceGetMappedEglFrame cuGraphicsResourceGetMappedMipmappedArray
                cuGraphicsResourceGetMappedPointer cuGraphicsResourceGetMappedPointer_v2
                cuGraphicsResourceSetMapFlags cuGraphicsResourceSetMapFlags_v2
                cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
                cuGraphicsUnmapResources_ptsz cuGraphicsUnregisterResource
                cuGreenCtxGetDevResource cuGreenCtxGetId cuGreenCtxRecordEvent
                cuGreenCtxStreamCreate cuGreenCtxWaitEvent cuInit cuKernelGetAttribute
                cuKernelGetLibrary cuKernelGetName cuKernelGetParamCount cuKernelGetParamInfo
                cuKernelSetAttribute cuKernelSetCacheConfig cuLaunch cuLaunchCooperativeKernel
                cuLaunchCooperativeKernelMultiDevice cuLaunchCooperativeKernel_ptsz cuLaunchGrid
                cuLaunchGridAsync cuLaunchHostFunc cuLaunchHostFunc_ptsz cuLaunchHostFunc_v2
                cuLaunchHostFunc_v2_ptsz cuLaunchKernel cuLaunchKernelEx cuLaunchKernelEx_ptsz
                cuLaunchKernel_ptsz cuLibraryEnumerateKernels cuLibraryGetGlobal cuLibraryGetKernel
                cuLibraryGetKernelCount cuLibraryGetUnifiedFunction cuLibraryUnload cuLinkAddData
                cuLinkAddData_v2 cuLinkAddFile cuLinkAddFile_v2 cuLinkCreate cuLinkCreate_v2
                cuLogicalEndpointDestroy cuLogicalEndpointExport cuLogicalEndpointGetLimits
                cuLogicalEndpointIdRelease cuLogicalEndpointIdReserve cuLogicalEndpointQuery
                cuLogicalEndpointUnbind cuLogsCurrent cuLogsDumpToFile cuLogsDumpToMemory
                cuLogsRegisterCallback cuLogsUnregisterCallback cuMemAddressFree cuMemAddressReserve
                cuMemAdvise cuMemAdvise_v2 cuMemAllocHost cuMemAllocHost_v2
                cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz
                cuMemDiscardAndPrefetchBatchAsync cuMemDiscardAndPrefetchBatchAsync_ptsz
                cuMemDiscardBatchAsync cuMemDiscardBatchAsync_ptsz cuMemFreeHost cuMemGetAccess
                cuMemGetAllocationGranularity cuMemGetDefaultMemPool
                cuMemGetMemPool cuMemHostAlloc cuMemHostGetDevicePointer
                cuMemHostGetDevicePointer_v2 cuMemHostGetFlags cuMemHostRegister
                cuMemHostRegister_v2 cuMemHostUnregister cuMemPoolGetAccess cuMemPrefetchAsync
                cuMemPrefetchAsync_ptsz cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz
                cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz cuMemRangeGetAttribute
                cuMemRangeGetAttributes cuMemSetMemPool cuMemcpy cuMemcpy2D cuMemcpy2DAsync
                cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz cuMemcpy2DUnaligned
                cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds cuMemcpy2D_v2 cuMemcpy2D_v2_ptds
                cuMemcpy3D cuMemcpy3DAsync cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz
                cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz cuMemcpy3DBatchAsync_v2
                cuMemcpy3DBatchAsync_v2_ptsz cuMemcpy3DPeer cuMemcpy3DPeerAsync
                cuMemcpy3DPeerAsync_ptsz cuMemcpy3DPeer_ptds cuMemcpy3DWithAttributesAsync
                cuMemcpy3DWithAttributesAsync_ptsz cuMemcpy3D_v2 cuMemcpy3D_v2_ptds cuMemcpyAsync
                cuMemcpyAsync_ptsz cuMemcpyAtoA cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds cuMemcpyAtoD
                cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds cuMemcpyAtoH cuMemcpyAtoHAsync
                cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds
                cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz cuMemcpyBatchAsync_v2
                cuMemcpyBatchAsync_v2_ptsz cuMemcpyDtoA cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds
                cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz
                cuMemcpyDtoD_v2 cuMemcpyDtoD_v2_ptds cuMemcpyDtoH cuMemcpyDtoHAsync
                cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds
                cuMemcpyHtoA cuMemcpyHtoAAsync cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz
                cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds cuMemcpyHtoD cuMemcpyHtoDAsync
                cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds
                cuMemcpyPeer cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz cuMemcpyPeer_ptds
                cuMemcpyWithAttributesAsync cuMemcpyWithAttributesAsync_ptsz cuMemcpy_ptds
                cuMemsetD16 cuMemsetD16Async cuMemsetD16Async_ptsz cuMemsetD16_v2
                cuMemsetD16_v2_ptds cuMemsetD2D16 cuMemsetD2D16Async cuMemsetD2D16Async_ptsz
                cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D32 cuMemsetD2D32Async
                cuMemsetD2D32Async_ptsz cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds cuMemsetD2D8
                cuMemsetD2D8Async cuMemsetD2D8Async_ptsz cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds
                cuMemsetD32 cuMemsetD32Async cuMemsetD32Async_ptsz cuMemsetD32_v2
                cuMemsetD32_v2_ptds cuMemsetD8 cuMemsetD8Async cuMemsetD8Async_ptsz cuMemsetD8_v2
                cuMemsetD8_v2_ptds cuMipmappedArrayDestroy cuMipmappedArrayGetLevel
                cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties
                cuModuleEnumerateFunctions cuModuleGetFunction cuModuleGetFunctionCount
                cuModuleGetGlobal cuModuleGetGlobal_v2 cuModuleGetLoadingMode cuModuleGetSurfRef
                cuModuleGetTexRef cuModuleUnload cuMulticastGetGranularity cuMulticastUnbind
                cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
                cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
                cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
                cuOccupancyMaxPotentialClusterSize cuParamSetSize cuParamSetTexRef cuParamSetf
                cuParamSeti cuParamSetv cuProfilerInitialize cuProfilerStart cuProfilerStop
                cuSignalExternalSemaphoresAsync cuSignalExternalSemaphoresAsync_ptsz
                cuStreamAddCallback cuStreamAddCallback_ptsz cuStreamBatchMemOp
                cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
                cuStreamCopyAttributes cuStreamCopyAttributes_ptsz cuStreamCreate
                cuStreamCreateWithPriority cuStreamGetAttribute cuStreamGetAttribute_ptsz
                cuStreamGetCaptureInfo cuStreamGetCaptureInfo_ptsz cuStreamGetCaptureInfo_v2
                cuStreamGetCaptureInfo_v2_ptsz cuStreamGetCaptureInfo_v3
                cuStreamGetCaptureInfo_v3_ptsz cuStreamGetCtx cuStreamGetCtx_ptsz cuStreamGetCtx_v2
                cuStreamGetCtx_v2_ptsz cuStreamGetDevResource cuStreamGetDevResource_ptsz
                cuStreamGetDevice cuStreamGetDevice_ptsz cuStreamGetFlags cuStreamGetFlags_ptsz
                cuStreamGetGreenCtx cuStreamGetId cuStreamGetId_ptsz cuStreamGetPriority
                cuStreamGetPriority_ptsz cuStreamSetAttribute cuStreamSetAttribute_ptsz
                cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_ptsz
                cuStreamUpdateCaptureDependencies_v2 cuStreamUpdateCaptureDependencies_v2_ptsz
                cuStreamWaitEvent cuStreamWaitEvent_ptsz cuStreamWaitValue32
                cuStreamWaitValue32_ptsz cuStreamWaitValue32_v2 cuStreamWaitValue32_v2_ptsz
                cuStreamWaitValue64 cuStreamWaitValue64_ptsz cuStreamWaitValue64_v2
                cuStreamWaitValue64_v2_ptsz cuStreamWriteValue32 cuStreamWriteValue32_ptsz
                cuStreamWriteValue32_v2 cuStreamWriteValue32_v2_ptsz cuStreamWriteValue64
                cuStreamWriteValue64_ptsz cuStreamWriteValue64_v2 cuStreamWriteValue64_v2_ptsz
                cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray
                cuSurfRefSetArray cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide
                cuTensorMapEncodeTiled cuTensorMapReplaceAddress cuTensorMapSetAllocationClass
                cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc
                cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate
                cuTexRefDestroy cuTexRefGetAddress cuTexRefGetAddressMode cuTexRefGetAddress_v2
                cuTexRefGetArray cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags
                cuTexRefGetFormat cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode
                cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray
                cuTexRefSetAddress cuTexRefSetAddress2D cuTexRefSetAddress2D_v2
                cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2
                cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags
                cuTexRefSetFormat cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode
                cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray
                cuThreadExchangeStreamCaptureMode cuUserObjectCreate cuUserObjectRelease
                cuUserObjectRetain cuVDPAUGetDevice cuWGLGetDevice cuWaitExternalSemaphoresAsync
                cuWaitExternalSemaphoresAsync_ptsz
            }
            MemoryInfo {
                cuMemGetInfo cuMemGetInfo_v2
            }
            Poll {
                cuEventQuery cuStreamQuery cuStreamQuery_ptsz
            }
            Sync {
                cuCtxSynchronize cuCtxSynchronize_v2 cuEventSynchronize cuStreamSynchronize
                cuStreamSynchronize_ptsz
            }
            Alloc {
                cuArray3DCreate cuArray3DCreate_v2 cuArrayCreate cuArrayCreate_v2 cuCtxCreate
                cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxSetLimit cuDevicePrimaryCtxRetain
                cuFuncLoad cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams
                cuGraphInstantiateWithParams_ptsz cuGraphInstantiate_v2 cuGraphLaunch
                cuGraphLaunch_ptsz cuGraphUpload cuGraphUpload_ptsz cuGreenCtxCreate
                cuKernelGetFunction cuLibraryGetModule cuLibraryLoadData cuLibraryLoadFromFile
                cuMemAlloc cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync
                cuMemAllocFromPoolAsync_ptsz cuMemAllocPitch cuMemAllocPitch_v2 cuMemAlloc_v2
                cuMemCreate cuMemPoolCreate cuMipmappedArrayCreate cuModuleLoad cuModuleLoadData
                cuModuleLoadDataEx cuModuleLoadFatBinary
            }
            Managed {
                cuLibraryGetManaged cuMemAllocManaged cuStreamAttachMemAsync
                cuStreamAttachMemAsync_ptsz
            }
            Peer {
                cuCtxEnablePeerAccess cuFabricCpyBatchAsync cuFabricCpyBatchAsync_ptsz
                cuLogicalEndpointAddDevice cuLogicalEndpointBindAddr cuLogicalEndpointBindMem
                cuLogicalEndpointCreate cuMulticastAddDevice cuMulticastBindAddr cuMulticastBindAddr_v2
                cuMulticastBindMem cuMulticastBindMem_v2 cuMulticastCreate
            }
            Access {
                cuMemSetAccess
            }
            PoolAccess {
                cuMemPoolSetAccess
            }
            Memory {
                cuCtxAttach cuCtxDestroy cuCtxDestroy_v2 cuCtxDetach cuCtxFromGreenCtx
                cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset
                cuDevicePrimaryCtxReset_v2 cuGreenCtxDestroy cuIpcCloseMemHandle cuMemFree
                cuMemFreeAsync cuMemFreeAsync_ptsz cuMemFree_v2 cuMemGetAddressRange
                cuMemGetAddressRange_v2 cuMemGetAllocationPropertiesFromHandle
                cuMemMap cuMemMapArrayAsync cuMemMapArrayAsync_ptsz cuMemPoolDestroy
                cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolTrimTo cuMemRelease
                cuMemRetainAllocationHandle cuMemUnmap cuPointerSetAttribute cuStreamBeginCapture
                cuStreamBeginCaptureToCig cuStreamBeginCaptureToCig_ptsz cuStreamBeginCaptureToGraph
                cuStreamBeginCaptureToGraph_ptsz cuStreamBeginCapture_ptsz cuStreamBeginCapture_v2
                cuStreamBeginCapture_v2_ptsz cuStreamBeginRecaptureToGraph
                cuStreamBeginRecaptureToGraph_ptsz cuStreamDestroy cuStreamDestroy_v2
                cuStreamEndCapture cuStreamEndCaptureToCig cuStreamEndCaptureToCig_ptsz
                cuStreamEndCapture_ptsz
            }
            Pointer {
                cuPointerGetAttribute cuPointerGetAttributes
            }
            Table {
                cuGetExportTable
            }
            Constant {
                cuDeviceComputeCapability cuDeviceGet cuDeviceGetCount cuDeviceGetName
                cuDeviceGetPCIBusId cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceTotalMem
                cuDeviceTotalMem_v2
            }
            Import {
                cuImportExternalMemory cuImportExternalSemaphore cuIpcGetEventHandle
                cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2
                cuMemExportToShareableHandle cuMemGetHandleForAddressRange
                cuMemImportFromShareableHandle cuMemPoolExportPointer
                cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle
                cuMemPoolImportPointer
            }
            Interop {
                cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect
                cuEGLStreamConsumerConnectWithFlags cuEGLStreamConsumerDisconnect
                cuEGLStreamConsumerReleaseFrame cuEGLStreamProducerConnect
                cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame
                cuEGLStreamProducerReturnFrame cuEventCreateFromEGLSync cuGLCtxCreate
                cuGLCtxCreate_v2 cuGLInit cuGLRegisterBufferObject cuGraphicsEGLRegisterImage
                cuGraphicsGLRegisterBuffer cuGraphicsGLRegisterImage
                cuGraphicsVDPAURegisterOutputSurface cuGraphicsVDPAURegisterVideoSurface
                cuLogicalEndpointImport cuVDPAUCtxCreate cuVDPAUCtxCreate_v2
            }
        }
    };
}
