//! The stream argument of a CUDA call, and queries about this stream.

use core::ffi::c_void;

use affinode_cuda_sys::result;

use super::super::contexts::current_context;
use super::super::driver::call;

/// A stream handle as the application passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub *mut c_void);

const NONE: usize = 0;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl Stream {
    /// Returns the stream for a handle that the application passed to a function with per-thread
    /// default streams (`_ptsz`). The null handle means the default stream of the calling thread.
    pub fn per_thread(handle: *mut c_void) -> Stream {
        let is_default = handle as usize == NONE;
        Stream(if is_default { PER_THREAD as *mut c_void } else { handle })
    }

    /// Whether calls on the stream are captured in a graph instead of run on the device. True also
    /// if the query fails.
    pub fn is_capturing(self) -> bool {
        let mut status = 1;
        let code = call!(stream_is_capturing(self.0, &raw mut status));
        code != result::SUCCESS || status != 0
    }

    /// The context of the stream. `None`: the query failed, or no context is current.
    pub fn context(self) -> Option<usize> {
        if matches!(self.0 as usize, NONE | LEGACY | PER_THREAD) {
            return current_context().filter(|context| *context != 0);
        }
        let mut context = 0;
        let code = call!(stream_get_context(self.0, &raw mut context));
        (code == result::SUCCESS && context != 0).then_some(context)
    }

    /// Id of the stream, which no other stream of its context has or will have. A handle, in
    /// contrast, may be reused after the stream's end. `None`: the query failed, or the stream is a
    /// thread's default stream, for which no unique id is known.
    pub fn id(self) -> Option<u64> {
        const OF_LEGACY: u64 = 1 << 63;
        match self.0 as usize {
            NONE | LEGACY => return Some(OF_LEGACY),
            PER_THREAD => return None,
            _ => {}
        }
        let mut id = 0;
        (call!(stream_get_id(self.0, &raw mut id)) == result::SUCCESS).then_some(id)
    }
}
