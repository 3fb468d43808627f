//! CUDA contexts, the stack of current contexts of each thread, and default streams.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;

use affinode_sim_protocol::{Request, STACK_LIMIT};

use crate::abi::{
    CUdevice, Handle, INVALID_CONTEXT, INVALID_HANDLE, Kind, Outcome, PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED, STREAM_LEGACY, STREAM_PER_THREAD, handle, number,
};
use crate::driver::{Driver, driver};
use crate::streams::{StreamId, StreamKind};

#[derive(Debug)]
struct Context {
    device: CUdevice,
    /// Number of times that the primary context is retained. `None` if this is not a primary
    /// context.
    retained: Option<u32>,
    legacy: StreamId,
    flags: u32,
    /// Local memory for each GPU thread in this context, in bytes.
    stack_limit: u64,
}

/// All contexts of the process, and the peer access between them.
#[derive(Debug, Default)]
pub struct Contexts {
    contexts: BTreeMap<u64, Context>,
    peers: BTreeSet<(u64, u64)>,
    /// Whether the process was checkpointed after it had used peer access. From then on, peer
    /// access can no longer be enabled.
    peers_spoilt: bool,
    peers_used: bool,
    next: u64,
}

/// The current context of the calling thread, in which a call runs.
#[derive(Debug, Clone, Copy)]
pub struct Current {
    pub context: u64,
    pub device: CUdevice,
    legacy: StreamId,
}

/// What stream 0 means in a function: the legacy default stream in functions such as `cuX`, the
/// per-thread default stream in the variants `cuX_ptsz`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default0 {
    Legacy,
    PerThread,
}

/// Default streams of one thread, by context. They are destroyed when the thread ends.
struct ThreadStreams(BTreeMap<u64, StreamId>);

impl Drop for ThreadStreams {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            for stream in self.0.values() {
                let _ = driver.streams.destroy(*stream);
            }
        }
    }
}

thread_local! {
    // Never dropped: exit handlers call the driver after the main thread's destructors have run.
    static STACK: ManuallyDrop<RefCell<Vec<u64>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static STREAMS: RefCell<ThreadStreams> = const { RefCell::new(ThreadStreams(BTreeMap::new())) };
}

/// Returns the context on top of this thread's stack. It may have been destroyed already.
pub fn top() -> Option<u64> {
    STACK.with(|stack| stack.borrow().last().copied())
}

/// Simulates the function `cuCtxPushCurrent`.
pub fn push(context: u64) {
    STACK.with(|stack| stack.borrow_mut().push(context));
}

/// Simulates the function `cuCtxPopCurrent`.
pub fn pop() -> Outcome<u64> {
    STACK.with(|stack| stack.borrow_mut().pop()).ok_or(INVALID_CONTEXT)
}

pub fn set(context: Option<u64>) {
    STACK.with(|stack| {
        let mut stack = stack.borrow_mut();
        stack.pop();
        stack.extend(context);
    });
}

impl Contexts {
    /// Returns the legacy default stream of a context.
    pub fn legacy_of(&self, id: u64) -> Outcome<StreamId> {
        self.contexts.get(&id).map(|context| context.legacy).ok_or(INVALID_CONTEXT)
    }

    pub fn find(&self, context: Handle) -> Outcome<u64> {
        let id = number(Kind::Context, context).map_err(|_| INVALID_CONTEXT)?;
        if self.contexts.contains_key(&id) { Ok(id) } else { Err(INVALID_CONTEXT) }
    }

    fn primary(&self, device: CUdevice) -> Option<u64> {
        let primary = |context: &Context| context.device == device && context.retained.is_some();
        self.contexts.iter().find(|(_, context)| primary(context)).map(|(id, _)| *id)
    }

    /// Returns the flags of a device's primary context, and whether the context exists.
    pub fn primary_state(&self, device: CUdevice) -> (u32, bool) {
        let context = self.primary(device).and_then(|id| self.contexts.get(&id));
        (context.map_or(0, |context| context.flags), context.is_some())
    }

    /// Returns the device and the flags of a context.
    pub fn get(&self, id: u64) -> Outcome<(CUdevice, u32)> {
        let context = self.contexts.get(&id).ok_or(INVALID_CONTEXT)?;
        Ok((context.device, context.flags))
    }

    /// Returns the local memory for each GPU thread in a context, in bytes.
    pub fn stack_limit(&self, id: u64) -> Outcome<u64> {
        self.contexts.get(&id).map(|context| context.stack_limit).ok_or(INVALID_CONTEXT)
    }

    /// Simulates the function `cuCtxEnablePeerAccess`.
    pub fn enable_peer(&mut self, from: u64, to: u64) -> Outcome {
        if self.peers_spoilt {
            return Err(INVALID_HANDLE);
        }
        self.peers_used = true;
        if self.peers.insert((from, to)) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }

    /// Simulates the function `cuCtxDisablePeerAccess`.
    pub fn disable_peer(&mut self, from: u64, to: u64) -> Outcome {
        if self.peers.remove(&(from, to)) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    }

    /// Returns whether peer access is enabled, and prepares for a checkpoint. If the process has
    /// ever used peer access, records that peer access can no longer be enabled.
    pub fn peer_access_before_checkpoint(&mut self) -> bool {
        self.peers_spoilt |= self.peers_used;
        !self.peers.is_empty()
    }
}

impl Driver {
    /// Returns the current context of the calling thread.
    pub fn current(&self) -> Outcome<Current> {
        let context = top().ok_or(INVALID_CONTEXT)?;
        let contexts = self.contexts();
        let found = contexts.contexts.get(&context).ok_or(INVALID_CONTEXT)?;
        Ok(Current { context, device: found.device, legacy: found.legacy })
    }

    /// Changes the stack limit of the current context, which immediately frees or allocates VRAM.
    pub fn set_stack_limit(&self, bytes: u64) -> Outcome {
        let current = self.current()?;
        self.link.tell(&Request::SetStackLimit { gpu: self.gpu(current.device)?, bytes })?;
        if let Some(context) = self.contexts().contexts.get_mut(&current.context) {
            context.stack_limit = bytes;
        }
        Ok(())
    }

    /// Creates a context, for `cuCtxCreate` or the first `cuDevicePrimaryCtxRetain`.
    pub fn create_context(&self, device: CUdevice, primary: bool, flags: u32) -> Outcome<u64> {
        self.link.tell(&Request::CreateContext { gpu: self.gpu(device)? })?;
        let mut contexts = self.contexts();
        contexts.next += 1;
        let id = contexts.next;
        let legacy = self.streams.create(id, StreamKind::Legacy);
        let retained = primary.then_some(1);
        contexts
            .contexts
            .insert(id, Context { device, retained, legacy, flags, stack_limit: STACK_LIMIT });
        Ok(id)
    }

    /// Simulates the function `cuDevicePrimaryCtxRetain`.
    pub fn retain_primary(&self, device: CUdevice) -> Outcome<u64> {
        self.gpu(device)?;
        let mut contexts = self.contexts();
        if let Some(id) = contexts.primary(device) {
            if let Some(retained) =
                contexts.contexts.get_mut(&id).and_then(|context| context.retained.as_mut())
            {
                *retained += 1;
            }
            return Ok(id);
        }
        drop(contexts);
        self.create_context(device, true, 0)
    }

    /// Simulates `cuDevicePrimaryCtxRelease`. If `reset` is true, drops all references to the
    /// context.
    pub fn release_primary(&self, device: CUdevice, reset: bool) -> Outcome {
        self.gpu(device)?;
        let mut contexts = self.contexts();
        let id = match contexts.primary(device) {
            Some(id) => id,
            None if reset => return Ok(()),
            None => return Err(INVALID_CONTEXT),
        };
        let retained = contexts.contexts.get_mut(&id).and_then(|context| context.retained.as_mut());
        let last = retained.is_none_or(|retained| {
            *retained -= 1;
            *retained == 0
        });
        drop(contexts);
        if last || reset { self.destroy_context(id) } else { Ok(()) }
    }

    /// Destroys a context and all of its objects.
    pub fn destroy_context(&self, id: u64) -> Outcome {
        self.streams.wait_idle(Some(id), None);
        let context = {
            let mut contexts = self.contexts();
            contexts.peers.retain(|(from, to)| *from != id && *to != id);
            contexts.contexts.remove(&id).ok_or(INVALID_CONTEXT)?
        };
        self.streams.destroy_context(id);
        let freed = self.memory().outlive(id);
        for address in freed {
            self.pool_takes_back(address)?;
        }
        self.trim_pools()?;
        let freed = self.memory().remove_context(id);
        for object in freed {
            self.link.tell(&Request::Free { object })?;
        }
        STACK.with(|stack| stack.borrow_mut().retain(|top| *top != id));
        self.link.tell(&Request::DestroyContext { gpu: self.gpu(context.device)? })
    }

    /// Returns the stream to which a handle refers in the calling thread.
    pub fn stream(&self, stream: Handle, zero: Default0) -> Outcome<StreamId> {
        match (stream, zero) {
            (STREAM_LEGACY, _) | (0, Default0::Legacy) => Ok(self.current()?.legacy),
            (STREAM_PER_THREAD, _) | (0, Default0::PerThread) => {
                let context = self.current()?.context;
                let create = || self.streams.create(context, StreamKind::Blocking);
                let known = STREAMS.try_with(|streams| {
                    *streams.borrow_mut().0.entry(context).or_insert_with(create)
                });
                // The thread is ending and its list of streams no longer exists, so a stream is
                // created only for this call.
                Ok(known.unwrap_or_else(|_| create()))
            }
            _ => {
                let id = number(Kind::Stream, stream)?;
                self.streams.get(id).map(|_| id)
            }
        }
    }

    /// Returns the index of the GPU on which a stream works.
    pub fn stream_gpu(&self, stream: StreamId) -> Outcome<usize> {
        let (context, _) = self.streams.get(stream)?;
        let (device, _) = self.contexts().get(context)?;
        self.gpu(device)
    }
}

/// Builds the handle of a context from its number.
pub fn context_handle(id: u64) -> Handle {
    handle(Kind::Context, id)
}
