//! A connection with a timeout for writes. A client that does not read uses memory of the
//! controller, so its connection is closed after the timeout.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

/// A connection whose writes may be pending only for a limited time.
#[derive(Debug)]
pub struct WriteTimeout<T> {
    inner: T,
    patience: Duration,
    stall: Pin<Box<Sleep>>,
    stalled: bool,
}

impl<T> WriteTimeout<T> {
    /// Creates a connection whose writes may be pending for at most `patience`.
    pub fn new(inner: T, patience: Duration) -> WriteTimeout<T> {
        WriteTimeout { inner, patience, stall: Box::pin(sleep(patience)), stalled: false }
    }

    fn check<R>(
        &mut self,
        context: &mut Context<'_>,
        outcome: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if outcome.is_ready() {
            self.stalled = false;
            return outcome;
        }
        if !self.stalled {
            self.stalled = true;
            self.stall.as_mut().reset(Instant::now() + self.patience);
        }
        ready!(self.stall.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read the response",
        )))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteTimeout<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_write(context, bytes);
        this.check(context, outcome)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_flush(context);
        this.check(context, outcome)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_shutdown(context);
        this.check(context, outcome)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stalled_reader_is_closed() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut timed = WriteTimeout::new(ours, Duration::from_secs(20));
        let error = timed.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
