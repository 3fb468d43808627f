//! Waits for the GPU's work in all contexts of the process, without the driver's checkpoint.
//!
//! ```text
//! each context: an event that captures all of its work ──> queried until all have occurred
//!                  │ none can be recorded: a stream is captured, or a context may be unknown
//!                  └─> Unseen: the caller takes the driver's lock, which waits too, but which the
//!                      driver refuses to clients of MPS
//! ```
//!
//! To record an event for a context invalidates a capture of the context's streams (measured, H200,
//! driver 580.159: `cuCtxRecordEvent` and `cuCtxSynchronize` do so in each capture mode). Therefore
//! wrappers record which streams are being captured, and which contexts the application has
//! created.

use core::sync::atomic::{AtomicUsize, Ordering};

use affinode_cuda_sys::{hook::Function, result};

use super::contexts::{in_context, primary_contexts};
use super::driver::{self, call};
use super::{REAL, SWAP, with_pool, wrappers};

/// Number of slots of a list: maximum number of contexts that the application creates, and of
/// streams that are captured at a time. If there are more, the agent cannot wait for work by
/// events.
pub(super) const SLOTS: usize = 16;
/// Flag of an event that measures no time, `CU_EVENT_DISABLE_TIMING`.
pub(super) const WITHOUT_TIMING: u32 = 2;

/// Functions that create a context or begin a capture.
const BEGINNINGS: [Function; 14] = [
    Function::cuCtxCreate,
    Function::cuCtxCreate_v2,
    Function::cuCtxCreate_v3,
    Function::cuCtxCreate_v4,
    Function::cuStreamBeginCapture,
    Function::cuStreamBeginCapture_ptsz,
    Function::cuStreamBeginCapture_v2,
    Function::cuStreamBeginCapture_v2_ptsz,
    Function::cuStreamBeginCaptureToGraph,
    Function::cuStreamBeginCaptureToGraph_ptsz,
    Function::cuStreamBeginCaptureToCig,
    Function::cuStreamBeginCaptureToCig_ptsz,
    Function::cuStreamBeginRecaptureToGraph,
    Function::cuStreamBeginRecaptureToGraph_ptsz,
];

/// Result of a wait for the GPU's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuWork {
    /// All work is done.
    Done,
    /// Some work still ran at the end of the wait.
    Running,
    /// Unknown, because events cannot be used.
    Unseen {
        /// Whether the cause may end: a stream is captured, or device memory is short.
        may_end: bool,
    },
    /// The driver returned this code.
    Failed(u32),
}

/// A list of values other than 0, with a fixed number of slots and in no order. It may contain a
/// value several times.
pub(super) struct ValueList {
    slots: [AtomicUsize; SLOTS],
    /// Number of values that could not be added, because no slot was free.
    missed: AtomicUsize,
}

impl ValueList {
    pub(super) const fn new() -> ValueList {
        ValueList { slots: [const { AtomicUsize::new(0) }; SLOTS], missed: AtomicUsize::new(0) }
    }

    pub(super) fn add(&self, value: usize) {
        let take = |slot: &AtomicUsize| {
            slot.compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if !self.slots.iter().any(take) {
            self.missed.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Removes one occurrence of the value. Returns false if the list does not contain it.
    pub(super) fn remove(&self, value: usize) -> bool {
        let free = |slot: &AtomicUsize| {
            slot.compare_exchange(value, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        value != 0 && self.slots.iter().any(free)
    }

    /// Whether the list contains the value.
    pub(super) fn has(&self, value: usize) -> bool {
        self.values().any(|known| known == value)
    }

    fn values(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().map(|slot| slot.load(Ordering::Acquire)).filter(|value| *value != 0)
    }

    /// Whether the list contains every value that was to be added.
    pub(super) fn is_complete(&self) -> bool {
        self.missed.load(Ordering::Acquire) == 0
    }
}

/// Waits until the GPU has done the work of every context. Stops earlier if `gives_up` returns
/// true. The function calls `gives_up` between two queries of an event. The gate must be closed, so
/// that no work is added.
pub fn wait(mut gives_up: impl FnMut() -> bool) -> GpuWork {
    if !are_contexts_known() || driver::ctx_record_event().is_none() {
        return GpuWork::Unseen { may_end: SWAP.captures.values().next().is_some() };
    }
    super::copy::relax_captures();
    with_pool(|_| {
        let mut events = ContextEvents { known: [(0, 0); 2 * SLOTS], count: 0 };
        let recorded = contexts().try_for_each(|context| events.record(context));
        let found = match recorded {
            Ok(()) => events.wait(&mut gives_up),
            Err(work) => work,
        };
        events.destroy();
        found
    })
}

/// Whether all contexts are known and none of their streams is being captured. Only then may the
/// agent make calls in all contexts, because such a call would invalidate a capture.
pub(super) fn are_contexts_known() -> bool {
    let captured = SWAP.captures.values().next().is_some() || !SWAP.captures.is_complete();
    let is_green = SWAP.green.load(Ordering::Acquire) == 1;
    !captured && !is_green && SWAP.contexts.is_complete()
}

/// Returns the contexts that exist now. Some may occur several times. No context may end during the
/// call.
pub(super) fn contexts() -> impl Iterator<Item = usize> {
    primary_contexts().chain(SWAP.contexts.values())
}

/// Records a call that reaches the driver without a wrapper. This is possible if memory is not
/// swappable yet, or if the program uses a later version of the function. If the call creates a
/// context or begins a capture, [`wait`] returns `Unseen` from then on.
pub(super) fn note_unseen(number: u32) {
    if BEGINNINGS.iter().any(|function| *function as u32 + 1 == number) {
        SWAP.contexts.missed.fetch_add(1, Ordering::AcqRel);
    }
    if number == Function::cuCtxAttach as u32 + 1 {
        SWAP.attached.missed.fetch_add(1, Ordering::AcqRel);
    }
}

/// Removes a context that has ended from the list of contexts, and all of its references.
pub(super) fn context_ends(context: usize) {
    SWAP.contexts.remove(context);
    while SWAP.attached.remove(context) {}
}

/// Removes a context from the list of contexts, although it may still exist. From then on [`wait`]
/// returns `Unseen`.
pub(super) fn abandon_context(context: usize) {
    SWAP.contexts.missed.fetch_add(1, Ordering::AcqRel);
    SWAP.contexts.remove(context);
}

/// Events that were recorded for contexts, each with its context.
struct ContextEvents {
    known: [(usize, usize); 2 * SLOTS],
    count: usize,
}

impl ContextEvents {
    fn record(&mut self, context: usize) -> Result<(), GpuWork> {
        if self.recorded().any(|(known, _)| known == context) {
            return Ok(());
        }
        let mut event = 0;
        let code = in_context(context, || call!(event_create(&raw mut event, WITHOUT_TIMING)));
        match code {
            result::SUCCESS => {}
            // The device has no memory for an event. The driver's lock needs no memory.
            result::OUT_OF_MEMORY => return Err(GpuWork::Unseen { may_end: true }),
            code => return Err(GpuWork::Failed(code)),
        }
        let Some(slot) = self.known.get_mut(self.count) else {
            in_context(context, || call!(event_destroy(event)));
            return Err(GpuWork::Unseen { may_end: false });
        };
        *slot = (context, event);
        self.count += 1;
        match in_context(context, || call!(ctx_record_event(context, event))) {
            result::SUCCESS => Ok(()),
            code => Err(GpuWork::Failed(code)),
        }
    }

    fn recorded(&self) -> impl Iterator<Item = (usize, usize)> {
        self.known.iter().take(self.count).copied()
    }

    fn wait(&self, gives_up: &mut impl FnMut() -> bool) -> GpuWork {
        for (context, event) in self.recorded() {
            loop {
                match in_context(context, || call!(event_query(event))) {
                    result::SUCCESS => break,
                    result::NOT_READY if gives_up() => return GpuWork::Running,
                    result::NOT_READY => {}
                    code => return GpuWork::Failed(code),
                }
            }
        }
        GpuWork::Done
    }

    fn destroy(&self) {
        for (context, event) in self.recorded() {
            in_context(context, || call!(event_destroy(event)));
        }
    }
}

/// Type of a driver function with at most six arguments, all of them integers or pointers. A call
/// passes six registers, even if the function has fewer arguments.
type SixArguments = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> u32;

fn real(function: Function) -> Option<SixArguments> {
    let index = wrappers::FUNCTIONS.iter().position(|known| *known == function)?;
    let address = REAL.get(index).map(|known| known.load(Ordering::Relaxed))?;
    // SAFETY: the wrapper of a function is called only if the driver has the function, and the
    // functions below have at most six arguments, which are passed in registers.
    (address != 0).then(|| unsafe { core::mem::transmute::<usize, SixArguments>(address) })
}

macro_rules! forwards {
    ($($name:ident $function:ident $then:ident;)*) => {$(
        #[doc = concat!("Wrapper of `", stringify!($function), "`.")]
        pub(super) unsafe extern "C" fn $name(
            a: usize, b: usize, c: usize, d: usize, e: usize, f: usize,
        ) -> u32 {
            let Some(function) = real(Function::$function) else { return result::NOT_INITIALIZED };
            // SAFETY: the arguments are the application's own.
            let code = unsafe { function(a, b, c, d, e, f) };
            $then(a, code);
            code
        }
    )*};
}

forwards! {
    ctx_create cuCtxCreate created;
    ctx_create_v2 cuCtxCreate_v2 created;
    ctx_create_v3 cuCtxCreate_v3 created;
    ctx_create_v4 cuCtxCreate_v4 created;
    begin_capture cuStreamBeginCapture begun;
    begin_capture_ptsz cuStreamBeginCapture_ptsz begun_ptsz;
    begin_capture_v2 cuStreamBeginCapture_v2 begun;
    begin_capture_v2_ptsz cuStreamBeginCapture_v2_ptsz begun_ptsz;
    begin_capture_to_graph cuStreamBeginCaptureToGraph begun;
    begin_capture_to_graph_ptsz cuStreamBeginCaptureToGraph_ptsz begun_ptsz;
    begin_capture_to_cig cuStreamBeginCaptureToCig begun;
    begin_capture_to_cig_ptsz cuStreamBeginCaptureToCig_ptsz begun_ptsz;
    begin_recapture cuStreamBeginRecaptureToGraph begun;
    begin_recapture_ptsz cuStreamBeginRecaptureToGraph_ptsz begun_ptsz;
    end_capture cuStreamEndCapture ended;
    end_capture_ptsz cuStreamEndCapture_ptsz ended_ptsz;
    end_capture_to_cig cuStreamEndCaptureToCig ended;
    end_capture_to_cig_ptsz cuStreamEndCaptureToCig_ptsz ended_ptsz;
    stream_destroy cuStreamDestroy destroyed;
    stream_destroy_v2 cuStreamDestroy_v2 destroyed;
}

/// Stream handle that means the calling thread's own default stream. In a function with the suffix
/// `_ptsz`, handle 0 has the same meaning.
const PER_THREAD: usize = 2;

fn created(context: usize, code: u32) {
    if code == result::SUCCESS {
        // SAFETY: the driver has just written the context there.
        SWAP.contexts.add(unsafe { *(context as *const usize) });
    }
}

fn begun(stream: usize, code: u32) {
    if code == result::SUCCESS {
        SWAP.captures.add(stream);
    }
}

fn begun_ptsz(stream: usize, code: u32) {
    begun(if stream == 0 { PER_THREAD } else { stream }, code);
}

/// Removes a stream from the list of captures when its capture ends. An invalid capture ends too,
/// although the call then returns an error.
fn ended(stream: usize, code: u32) {
    const STREAM_CAPTURE_WRONG_THREAD: u32 = 908;
    if code != STREAM_CAPTURE_WRONG_THREAD {
        SWAP.captures.remove(stream);
    }
}

fn ended_ptsz(stream: usize, code: u32) {
    ended(if stream == 0 { PER_THREAD } else { stream }, code);
}

fn destroyed(stream: usize, code: u32) {
    if code == result::SUCCESS {
        SWAP.captures.remove(stream);
    }
}

#[cfg(test)]
pub(super) mod tests;
