//! The functions of NVIDIA's management library (NVML) and the class of each. The class determines
//! how the library handles calls while the process's context is checkpointed. NVML itself would
//! block until the context is restored.

/// How the library handles calls of NVML functions while the context is checkpointed. The table in
/// `docs/nvml.md` lists the functions of each class. The comment of a class begins with the
/// arguments of its functions, if all have the same. A cached result comes from an earlier call
/// that reached NVML. A reading is a figure that the controller has read from NVML and sent to this
/// process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// Calls pass in every state, because they do not reach the driver.
    Pass,
    /// The function initialises NVML. If NVML is already initialised, the library only counts the
    /// call. If not, the call waits until the process is restored.
    Init,
    /// The function shuts NVML down. The library only counts the call. NVML stays initialised in a
    /// process that uses CUDA.
    Shutdown,
    /// Functions with the arguments `(u32 *)`. The library returns the cached result.
    Word,
    /// Functions with the arguments `(char *, length)`. The library returns the cached text.
    Text,
    /// Functions with the arguments `(index, device *)`. The library returns the cached handle for
    /// the same index.
    Handle,
    /// Functions with the arguments `(text, device *)`. The library returns the cached handle for
    /// the same text.
    HandleByText,
    /// Functions with the arguments `(device, char *, length)`. The library returns the cached text
    /// for the same device.
    DeviceText,
    /// Functions with the arguments `(device, u32 *)`. The library returns the cached result for
    /// the same device.
    DeviceWord,
    /// Functions with the arguments `(device, u64 *)`. The library returns the cached result for
    /// the same device.
    DeviceLong,
    /// Functions with the arguments `(device, u32 *, u32 *)`. The library returns both cached
    /// results for the same device.
    DevicePair,
    /// Functions with the arguments `(device, kind, u32 *)`. The library returns the cached result
    /// for the same device and kind.
    DeviceKindWord,
    /// Functions with the arguments `(device, nvmlPciInfo_t *)`. The library returns the cached
    /// result for the same device.
    DevicePci,
    /// Functions with the arguments `(device, nvmlMemory_t *)`. The library returns the
    /// controller's reading of the device.
    Memory,
    /// Functions with the arguments `(device, nvmlMemory_v2_t *)`. The library returns the
    /// controller's reading of the device.
    MemoryV2,
    /// Functions with the arguments `(device, nvmlUtilization_t *)`. The library returns the
    /// controller's reading of the device.
    Utilization,
    /// Functions with the arguments `(device, sensor, u32 *)`. The library returns the controller's
    /// reading of this sensor.
    Temperature,
    /// Functions with the arguments `(device, nvmlTemperature_t *)`. The library returns the
    /// controller's reading of the device.
    TemperatureV,
    /// Functions with the arguments `(device, u32 *)`. The library returns the controller's reading
    /// of the device, in milliwatts.
    Power,
    /// Functions with the arguments `(device, count *, processes *)`. The library returns an empty
    /// list.
    Processes,
    /// Functions with the arguments `(set, data *, timeout)`, which wait for events. The library
    /// waits outside NVML instead, and does not restore the process.
    Wait,
    /// The call waits until the process is restored.
    Held,
}

macro_rules! define_functions {
    ($($class:ident { $($name:ident)* })*) => {
        /// The NVML functions in the list of `nvml_functions`, in the order of the list.
        #[allow(missing_docs, nonstandard_style, reason = "the names are NVIDIA's")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Function { $($($name,)*)* }

        /// The names of all listed functions as one string. A table of references would cost every
        /// process a relocation per name, as in [`crate::hook`].
        const NAMES: &str = concat!($($(stringify!($name), "\0",)*)*);
        /// The number of listed functions.
        pub const COUNT: usize = [$($(Function::$name,)*)*].len();
        const SECTIONS: &[(Class, usize)] =
            &[$((Class::$class, [$(Function::$name,)*].len()),)*];
    };
}
crate::nvml_functions!(define_functions);

/// Index of the function that returns the UUID of a handle's device.
pub const UUID: usize = Function::nvmlDeviceGetUUID as usize;
/// Index of `nvmlInitWithFlags`. Of the functions that initialise NVML, only this one has an
/// argument.
pub const INIT_WITH_FLAGS: usize = Function::nvmlInitWithFlags as usize;

const fn offsets() -> [u16; COUNT] {
    let names = NAMES.as_bytes();
    let mut offsets = [0; COUNT];
    let (mut index, mut at) = (1, 0);
    while index < COUNT {
        if names[at] == 0 {
            offsets[index] = (at + 1) as u16;
            index += 1;
        }
        at += 1;
    }
    offsets
}

static OFFSETS: [u16; COUNT] = offsets();

/// Returns the name of a listed function.
#[must_use]
pub fn name(index: usize) -> Option<&'static str> {
    let start = usize::from(*OFFSETS.get(index)?);
    let end = OFFSETS.get(index + 1).map_or(NAMES.len(), |o| usize::from(*o));
    NAMES.get(start..end.checked_sub(1)?)
}

/// Returns the index of the listed function with this name.
#[must_use]
pub fn find(sought: &[u8]) -> Option<usize> {
    let mut start = 0;
    for &(_, count) in SECTIONS {
        let (mut low, mut high) = (start, start + count);
        while low < high {
            let middle = low.midpoint(high);
            match name(middle)?.as_bytes().cmp(sought) {
                core::cmp::Ordering::Equal => return Some(middle),
                core::cmp::Ordering::Less => low = middle + 1,
                core::cmp::Ordering::Greater => high = middle,
            }
        }
        start += count;
    }
    None
}

/// Returns the class of a listed function. A function that is not listed has the class `Held`.
#[must_use]
pub fn class(index: usize) -> Class {
    let mut start = 0;
    for &(class, count) in SECTIONS {
        if index < start + count {
            return class;
        }
        start += count;
    }
    Class::Held
}

/// Calls the macro `$with` with the list of functions, sorted by name within each class.
#[macro_export]
macro_rules! nvml_functions {
    ($with:path) => {
        $with! {
            Pass {
                nvmlErrorString
            }
            Init {
                nvmlInit
                nvmlInitWithFlags
                nvmlInit_v2
            }
            Shutdown {
                nvmlShutdown
            }
            Word {
                nvmlDeviceGetCount
                nvmlDeviceGetCount_v2
                nvmlSystemGetCudaDriverVersion
                nvmlSystemGetCudaDriverVersion_v2
            }
            Text {
                nvmlSystemGetDriverVersion
                nvmlSystemGetNVMLVersion
            }
            Handle {
                nvmlDeviceGetHandleByIndex
                nvmlDeviceGetHandleByIndex_v2
            }
            HandleByText {
                nvmlDeviceGetHandleByPciBusId
                nvmlDeviceGetHandleByPciBusId_v2
                nvmlDeviceGetHandleBySerial
                nvmlDeviceGetHandleByUUID
            }
            DeviceText {
                nvmlDeviceGetBoardPartNumber
                nvmlDeviceGetInforomImageVersion
                nvmlDeviceGetName
                nvmlDeviceGetSerial
                nvmlDeviceGetUUID
                nvmlDeviceGetVbiosVersion
            }
            DeviceWord {
                nvmlDeviceGetArchitecture
                nvmlDeviceGetBoardId
                nvmlDeviceGetBrand
                nvmlDeviceGetBusType
                nvmlDeviceGetComputeMode
                nvmlDeviceGetCurrPcieLinkGeneration
                nvmlDeviceGetCurrPcieLinkWidth
                nvmlDeviceGetDisplayActive
                nvmlDeviceGetDisplayMode
                nvmlDeviceGetEnforcedPowerLimit
                nvmlDeviceGetFanSpeed
                nvmlDeviceGetGpuMaxPcieLinkGeneration
                nvmlDeviceGetIndex
                nvmlDeviceGetMaxMigDeviceCount
                nvmlDeviceGetMaxPcieLinkGeneration
                nvmlDeviceGetMaxPcieLinkWidth
                nvmlDeviceGetMemoryBusWidth
                nvmlDeviceGetMinorNumber
                nvmlDeviceGetMultiGpuBoard
                nvmlDeviceGetNumFans
                nvmlDeviceGetNumGpuCores
                nvmlDeviceGetPerformanceState
                nvmlDeviceGetPersistenceMode
                nvmlDeviceGetPowerManagementDefaultLimit
                nvmlDeviceGetPowerManagementLimit
                nvmlDeviceGetPowerManagementMode
                nvmlDeviceGetPowerState
                nvmlDeviceGetVirtualizationMode
                nvmlDeviceIsMigDeviceHandle
            }
            DeviceLong {
                nvmlDeviceGetCurrentClocksEventReasons
                nvmlDeviceGetCurrentClocksThrottleReasons
                nvmlDeviceGetSupportedClocksEventReasons
                nvmlDeviceGetSupportedClocksThrottleReasons
                nvmlDeviceGetTotalEnergyConsumption
            }
            DevicePair {
                nvmlDeviceGetCudaComputeCapability
                nvmlDeviceGetDecoderUtilization
                nvmlDeviceGetEccMode
                nvmlDeviceGetEncoderUtilization
                nvmlDeviceGetMigMode
                nvmlDeviceGetPowerManagementLimitConstraints
            }
            DeviceKindWord {
                nvmlDeviceGetApplicationsClock
                nvmlDeviceGetClockInfo
                nvmlDeviceGetDefaultApplicationsClock
                nvmlDeviceGetMaxClockInfo
                nvmlDeviceGetTemperatureThreshold
            }
            DevicePci {
                nvmlDeviceGetPciInfo_v2
                nvmlDeviceGetPciInfo_v3
            }
            Memory {
                nvmlDeviceGetMemoryInfo
            }
            MemoryV2 {
                nvmlDeviceGetMemoryInfo_v2
            }
            Utilization {
                nvmlDeviceGetUtilizationRates
            }
            Temperature {
                nvmlDeviceGetTemperature
            }
            TemperatureV {
                nvmlDeviceGetTemperatureV
            }
            Power {
                nvmlDeviceGetPowerUsage
            }
            Processes {
                nvmlDeviceGetComputeRunningProcesses
                nvmlDeviceGetComputeRunningProcesses_v2
                nvmlDeviceGetComputeRunningProcesses_v3
                nvmlDeviceGetGraphicsRunningProcesses
                nvmlDeviceGetGraphicsRunningProcesses_v2
                nvmlDeviceGetGraphicsRunningProcesses_v3
                nvmlDeviceGetMPSComputeRunningProcesses
                nvmlDeviceGetMPSComputeRunningProcesses_v2
                nvmlDeviceGetMPSComputeRunningProcesses_v3
            }
            Wait {
                nvmlEventSetWait
                nvmlEventSetWait_v2
            }
            Held {
                nvmlComputeInstanceDestroy
                nvmlComputeInstanceGetInfo
                nvmlComputeInstanceGetInfo_v2
                nvmlDeviceClearAccountingPids
                nvmlDeviceClearCpuAffinity
                nvmlDeviceClearEccErrorCounts
                nvmlDeviceClearFieldValues
                nvmlDeviceCreateGpuInstance
                nvmlDeviceCreateGpuInstanceWithPlacement
                nvmlDeviceDiscoverGpus
                nvmlDeviceFreezeNvLinkUtilizationCounter
                nvmlDeviceGetAPIRestriction
                nvmlDeviceGetAccountingBufferSize
                nvmlDeviceGetAccountingMode
                nvmlDeviceGetAccountingPids
                nvmlDeviceGetAccountingStats
                nvmlDeviceGetActiveVgpus
                nvmlDeviceGetAdaptiveClockInfoStatus
                nvmlDeviceGetAddressingMode
                nvmlDeviceGetAttributes
                nvmlDeviceGetAttributes_v2
                nvmlDeviceGetAutoBoostedClocksEnabled
                nvmlDeviceGetBAR1MemoryInfo
                nvmlDeviceGetBridgeChipInfo
                nvmlDeviceGetC2cModeInfoV
                nvmlDeviceGetCapabilities
                nvmlDeviceGetClkMonStatus
                nvmlDeviceGetClock
                nvmlDeviceGetClockOffsets
                nvmlDeviceGetComputeInstanceId
                nvmlDeviceGetConfComputeGpuAttestationReport
                nvmlDeviceGetConfComputeGpuCertificate
                nvmlDeviceGetConfComputeMemSizeInfo
                nvmlDeviceGetConfComputeProtectedMemoryUsage
                nvmlDeviceGetCoolerInfo
                nvmlDeviceGetCpuAffinity
                nvmlDeviceGetCpuAffinityWithinScope
                nvmlDeviceGetCreatableVgpus
                nvmlDeviceGetCurrentClockFreqs
                nvmlDeviceGetDefaultEccMode
                nvmlDeviceGetDetailedEccErrors
                nvmlDeviceGetDeviceHandleFromMigDeviceHandle
                nvmlDeviceGetDramEncryptionMode
                nvmlDeviceGetDriverModel
                nvmlDeviceGetDriverModel_v2
                nvmlDeviceGetDynamicPstatesInfo
                nvmlDeviceGetEncoderCapacity
                nvmlDeviceGetEncoderSessions
                nvmlDeviceGetEncoderStats
                nvmlDeviceGetFBCSessions
                nvmlDeviceGetFBCStats
                nvmlDeviceGetFanControlPolicy_v2
                nvmlDeviceGetFanSpeedRPM
                nvmlDeviceGetFanSpeed_v2
                nvmlDeviceGetFieldValues
                nvmlDeviceGetGpcClkMinMaxVfOffset
                nvmlDeviceGetGpcClkVfOffset
                nvmlDeviceGetGpuFabricInfo
                nvmlDeviceGetGpuFabricInfoV
                nvmlDeviceGetGpuInstanceById
                nvmlDeviceGetGpuInstanceId
                nvmlDeviceGetGpuInstancePossiblePlacements
                nvmlDeviceGetGpuInstancePossiblePlacements_v2
                nvmlDeviceGetGpuInstanceProfileInfo
                nvmlDeviceGetGpuInstanceProfileInfoByIdV
                nvmlDeviceGetGpuInstanceProfileInfoV
                nvmlDeviceGetGpuInstanceRemainingCapacity
                nvmlDeviceGetGpuInstances
                nvmlDeviceGetGpuOperationMode
                nvmlDeviceGetGridLicensableFeatures
                nvmlDeviceGetGridLicensableFeatures_v2
                nvmlDeviceGetGridLicensableFeatures_v3
                nvmlDeviceGetGridLicensableFeatures_v4
                nvmlDeviceGetGspFirmwareMode
                nvmlDeviceGetGspFirmwareVersion
                nvmlDeviceGetHandleByUUIDV
                nvmlDeviceGetHostVgpuMode
                nvmlDeviceGetInforomConfigurationChecksum
                nvmlDeviceGetInforomVersion
                nvmlDeviceGetIrqNum
                nvmlDeviceGetJpgUtilization
                nvmlDeviceGetLastBBXFlushTime
                nvmlDeviceGetMarginTemperature
                nvmlDeviceGetMaxCustomerBoostClock
                nvmlDeviceGetMemClkMinMaxVfOffset
                nvmlDeviceGetMemClkVfOffset
                nvmlDeviceGetMemoryAffinity
                nvmlDeviceGetMemoryErrorCounter
                nvmlDeviceGetMigDeviceHandleByIndex
                nvmlDeviceGetMinMaxClockOfPState
                nvmlDeviceGetMinMaxFanSpeed
                nvmlDeviceGetModuleId
                nvmlDeviceGetNumaNodeId
                nvmlDeviceGetNvLinkCapability
                nvmlDeviceGetNvLinkErrorCounter
                nvmlDeviceGetNvLinkInfo
                nvmlDeviceGetNvLinkRemoteDeviceType
                nvmlDeviceGetNvLinkRemotePciInfo
                nvmlDeviceGetNvLinkRemotePciInfo_v2
                nvmlDeviceGetNvLinkState
                nvmlDeviceGetNvLinkUtilizationControl
                nvmlDeviceGetNvLinkUtilizationCounter
                nvmlDeviceGetNvLinkVersion
                nvmlDeviceGetNvlinkBwMode
                nvmlDeviceGetNvlinkSupportedBwModes
                nvmlDeviceGetOfaUtilization
                nvmlDeviceGetP2PStatus
                nvmlDeviceGetPciInfo
                nvmlDeviceGetPciInfoExt
                nvmlDeviceGetPcieLinkMaxSpeed
                nvmlDeviceGetPcieReplayCounter
                nvmlDeviceGetPcieSpeed
                nvmlDeviceGetPcieThroughput
                nvmlDeviceGetPdi
                nvmlDeviceGetPerformanceModes
                nvmlDeviceGetPgpuMetadataString
                nvmlDeviceGetPlatformInfo
                nvmlDeviceGetPowerMizerMode_v1
                nvmlDeviceGetPowerSource
                nvmlDeviceGetProcessUtilization
                nvmlDeviceGetProcessesUtilizationInfo
                nvmlDeviceGetRemappedRows
                nvmlDeviceGetRepairStatus
                nvmlDeviceGetRetiredPages
                nvmlDeviceGetRetiredPagesPendingStatus
                nvmlDeviceGetRetiredPages_v2
                nvmlDeviceGetRowRemapperHistogram
                nvmlDeviceGetRunningProcessDetailList
                nvmlDeviceGetSamples
                nvmlDeviceGetSramEccErrorStatus
                nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts
                nvmlDeviceGetSupportedEventTypes
                nvmlDeviceGetSupportedGraphicsClocks
                nvmlDeviceGetSupportedMemoryClocks
                nvmlDeviceGetSupportedPerformanceStates
                nvmlDeviceGetSupportedVgpus
                nvmlDeviceGetTargetFanSpeed
                nvmlDeviceGetThermalSettings
                nvmlDeviceGetTopologyCommonAncestor
                nvmlDeviceGetTopologyNearestGpus
                nvmlDeviceGetTotalEccErrors
                nvmlDeviceGetVgpuCapabilities
                nvmlDeviceGetVgpuHeterogeneousMode
                nvmlDeviceGetVgpuInstancesUtilizationInfo
                nvmlDeviceGetVgpuMetadata
                nvmlDeviceGetVgpuProcessUtilization
                nvmlDeviceGetVgpuProcessesUtilizationInfo
                nvmlDeviceGetVgpuSchedulerCapabilities
                nvmlDeviceGetVgpuSchedulerLog
                nvmlDeviceGetVgpuSchedulerState
                nvmlDeviceGetVgpuTypeCreatablePlacements
                nvmlDeviceGetVgpuTypeSupportedPlacements
                nvmlDeviceGetVgpuUtilization
                nvmlDeviceGetViolationStatus
                nvmlDeviceModifyDrainState
                nvmlDeviceOnSameBoard
                nvmlDevicePowerSmoothingActivatePresetProfile
                nvmlDevicePowerSmoothingSetState
                nvmlDevicePowerSmoothingUpdatePresetProfileParam
                nvmlDeviceQueryDrainState
                nvmlDeviceReadWritePRM_v1
                nvmlDeviceRegisterEvents
                nvmlDeviceRemoveGpu
                nvmlDeviceRemoveGpu_v2
                nvmlDeviceResetApplicationsClocks
                nvmlDeviceResetGpuLockedClocks
                nvmlDeviceResetMemoryLockedClocks
                nvmlDeviceResetNvLinkErrorCounters
                nvmlDeviceResetNvLinkUtilizationCounter
                nvmlDeviceSetAPIRestriction
                nvmlDeviceSetAccountingMode
                nvmlDeviceSetApplicationsClocks
                nvmlDeviceSetAutoBoostedClocksEnabled
                nvmlDeviceSetClockOffsets
                nvmlDeviceSetComputeMode
                nvmlDeviceSetConfComputeUnprotectedMemSize
                nvmlDeviceSetCpuAffinity
                nvmlDeviceSetDefaultAutoBoostedClocksEnabled
                nvmlDeviceSetDefaultFanSpeed_v2
                nvmlDeviceSetDramEncryptionMode
                nvmlDeviceSetDriverModel
                nvmlDeviceSetEccMode
                nvmlDeviceSetFanControlPolicy
                nvmlDeviceSetFanSpeed_v2
                nvmlDeviceSetGpcClkVfOffset
                nvmlDeviceSetGpuLockedClocks
                nvmlDeviceSetGpuOperationMode
                nvmlDeviceSetMemClkVfOffset
                nvmlDeviceSetMemoryLockedClocks
                nvmlDeviceSetMigMode
                nvmlDeviceSetNvLinkDeviceLowPowerThreshold
                nvmlDeviceSetNvLinkUtilizationControl
                nvmlDeviceSetNvlinkBwMode
                nvmlDeviceSetPersistenceMode
                nvmlDeviceSetPowerManagementLimit
                nvmlDeviceSetPowerManagementLimit_v2
                nvmlDeviceSetPowerMizerMode_v1
                nvmlDeviceSetTemperatureThreshold
                nvmlDeviceSetVgpuCapabilities
                nvmlDeviceSetVgpuHeterogeneousMode
                nvmlDeviceSetVgpuSchedulerState
                nvmlDeviceSetVirtualizationMode
                nvmlDeviceValidateInforom
                nvmlDeviceWorkloadPowerProfileClearRequestedProfiles
                nvmlDeviceWorkloadPowerProfileGetCurrentProfiles
                nvmlDeviceWorkloadPowerProfileGetProfilesInfo
                nvmlDeviceWorkloadPowerProfileSetRequestedProfiles
                nvmlEventSetCreate
                nvmlEventSetFree
                nvmlGetExcludedDeviceCount
                nvmlGetExcludedDeviceInfoByIndex
                nvmlGetVgpuCompatibility
                nvmlGetVgpuDriverCapabilities
                nvmlGetVgpuVersion
                nvmlGpmMetricsGet
                nvmlGpmMigSampleGet
                nvmlGpmQueryDeviceSupport
                nvmlGpmQueryIfStreamingEnabled
                nvmlGpmSampleAlloc
                nvmlGpmSampleFree
                nvmlGpmSampleGet
                nvmlGpmSetStreamingEnabled
                nvmlGpuInstanceCreateComputeInstance
                nvmlGpuInstanceCreateComputeInstanceWithPlacement
                nvmlGpuInstanceDestroy
                nvmlGpuInstanceGetActiveVgpus
                nvmlGpuInstanceGetComputeInstanceById
                nvmlGpuInstanceGetComputeInstancePossiblePlacements
                nvmlGpuInstanceGetComputeInstanceProfileInfo
                nvmlGpuInstanceGetComputeInstanceProfileInfoV
                nvmlGpuInstanceGetComputeInstanceRemainingCapacity
                nvmlGpuInstanceGetComputeInstances
                nvmlGpuInstanceGetCreatableVgpus
                nvmlGpuInstanceGetInfo
                nvmlGpuInstanceGetVgpuHeterogeneousMode
                nvmlGpuInstanceGetVgpuSchedulerLog
                nvmlGpuInstanceGetVgpuSchedulerState
                nvmlGpuInstanceGetVgpuTypeCreatablePlacements
                nvmlGpuInstanceSetVgpuHeterogeneousMode
                nvmlGpuInstanceSetVgpuSchedulerState
                nvmlInternalGetExportTable
                nvmlReturn
                nvmlSetVgpuVersion
                nvmlSystemEventSetCreate
                nvmlSystemEventSetFree
                nvmlSystemEventSetWait
                nvmlSystemGetConfComputeCapabilities
                nvmlSystemGetConfComputeGpusReadyState
                nvmlSystemGetConfComputeKeyRotationThresholdInfo
                nvmlSystemGetConfComputeSettings
                nvmlSystemGetConfComputeState
                nvmlSystemGetDriverBranch
                nvmlSystemGetHicVersion
                nvmlSystemGetNvlinkBwMode
                nvmlSystemGetProcessName
                nvmlSystemGetTopologyGpuSet
                nvmlSystemRegisterEvents
                nvmlSystemSetConfComputeGpusReadyState
                nvmlSystemSetConfComputeKeyRotationThresholdInfo
                nvmlSystemSetNvlinkBwMode
                nvmlUnitGetCount
                nvmlUnitGetDevices
                nvmlUnitGetFanSpeedInfo
                nvmlUnitGetHandleByIndex
                nvmlUnitGetLedState
                nvmlUnitGetPsuInfo
                nvmlUnitGetTemperature
                nvmlUnitGetUnitInfo
                nvmlUnitSetLedState
                nvmlVgpuInstanceClearAccountingPids
                nvmlVgpuInstanceGetAccountingMode
                nvmlVgpuInstanceGetAccountingPids
                nvmlVgpuInstanceGetAccountingStats
                nvmlVgpuInstanceGetEccMode
                nvmlVgpuInstanceGetEncoderCapacity
                nvmlVgpuInstanceGetEncoderSessions
                nvmlVgpuInstanceGetEncoderStats
                nvmlVgpuInstanceGetFBCSessions
                nvmlVgpuInstanceGetFBCStats
                nvmlVgpuInstanceGetFbUsage
                nvmlVgpuInstanceGetFrameRateLimit
                nvmlVgpuInstanceGetGpuInstanceId
                nvmlVgpuInstanceGetGpuPciId
                nvmlVgpuInstanceGetLicenseInfo
                nvmlVgpuInstanceGetLicenseInfo_v2
                nvmlVgpuInstanceGetLicenseStatus
                nvmlVgpuInstanceGetMdevUUID
                nvmlVgpuInstanceGetMetadata
                nvmlVgpuInstanceGetPlacementId
                nvmlVgpuInstanceGetRuntimeStateSize
                nvmlVgpuInstanceGetType
                nvmlVgpuInstanceGetUUID
                nvmlVgpuInstanceGetVmDriverVersion
                nvmlVgpuInstanceGetVmID
                nvmlVgpuInstanceSetEncoderCapacity
                nvmlVgpuTypeGetBAR1Info
                nvmlVgpuTypeGetCapabilities
                nvmlVgpuTypeGetClass
                nvmlVgpuTypeGetDeviceID
                nvmlVgpuTypeGetFbReservation
                nvmlVgpuTypeGetFrameRateLimit
                nvmlVgpuTypeGetFramebufferSize
                nvmlVgpuTypeGetGpuInstanceProfileId
                nvmlVgpuTypeGetGspHeapSize
                nvmlVgpuTypeGetLicense
                nvmlVgpuTypeGetMaxInstances
                nvmlVgpuTypeGetMaxInstancesPerGpuInstance
                nvmlVgpuTypeGetMaxInstancesPerVm
                nvmlVgpuTypeGetName
                nvmlVgpuTypeGetNumDisplayHeads
                nvmlVgpuTypeGetResolution
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_found_by_its_name() {
        for index in 0..COUNT {
            assert_eq!(find(name(index).unwrap().as_bytes()), Some(index));
        }
        assert_eq!(find(b"nvmlDeviceGetNothing"), None);
        assert_eq!(name(COUNT), None);
        assert_eq!(class(COUNT), Class::Held);
    }

    /// Checks that `docs/nvml.md` lists every function that is not held, in the row of its class.
    /// All other functions are held.
    #[test]
    fn documents_name_each_function_and_class() {
        let text = include_str!("../../../docs/nvml.md");
        let rows: Vec<(&str, &str)> =
            text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | ")).collect();
        let mut documented = 0;
        for (class_word, row) in rows {
            let functions = row.split('|').next().unwrap_or_default();
            for function in functions.split('`').skip(1).step_by(2) {
                let index = find(function.as_bytes()).unwrap_or_else(|| panic!("{function}"));
                assert_eq!(format!("{:?}", class(index)), class_word, "{function}");
                documented += 1;
            }
        }
        let answered = (0..COUNT).filter(|index| class(*index) != Class::Held).count();
        assert_eq!(documented, answered, "docs/nvml.md names every function that is not held");
    }
}
