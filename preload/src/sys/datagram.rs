//! Unix datagram sockets with abstract names, and pairs of connected sockets for replies.

use super::{CLOEXEC, Descriptor, Errno, lift, notify, number, plain};

const AF_UNIX: u16 = 1;
const DATAGRAM: usize = 2;
const SEQPACKET: usize = 5;
const NONBLOCK: usize = 0x800;

/// A `struct sockaddr_un` of an abstract name, and its length.
struct Address {
    bytes: [u8; 110],
    length: usize,
}

impl Address {
    fn of(name: &[u8]) -> Option<Address> {
        // Bytes before the name: the address family, and the zero that makes the name abstract.
        const BEFORE: usize = 3;
        let mut bytes = [0; 110];
        let length = BEFORE + name.len();
        bytes.first_chunk_mut().map(|family| *family = AF_UNIX.to_ne_bytes())?;
        bytes.get_mut(BEFORE..length)?.copy_from_slice(name);
        Some(Address { bytes, length })
    }
}

fn socket() -> Result<Descriptor, Errno> {
    let kind = DATAGRAM | NONBLOCK | CLOEXEC;
    let socket = plain(number::SOCKET, [usize::from(AF_UNIX), kind, 0, 0, 0, 0])?;
    Ok(Descriptor(lift(socket as i32)))
}

/// Binds or connects a socket to the name. `call` is the number of the system call: bind or
/// connect.
fn name_it(socket: &Descriptor, name: &[u8], call: usize) -> Result<(), Errno> {
    const ENAMETOOLONG: Errno = Errno(36);
    let address = Address::of(name).ok_or(ENAMETOOLONG)?;
    let at = address.bytes.as_ptr() as usize;
    plain(call, [socket.number() as usize, at, address.length, 0, 0, 0]).map(drop)
}

/// Description of the datagrams that a socket accepts. A datagram is recognised by its first bytes
/// and its length.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedSender<'a> {
    /// The first bytes that an accepted datagram must have.
    pub begin: &'a [u8; BEGIN_BYTES],
    /// The length that an accepted datagram must have.
    pub length: usize,
}

/// Number of bytes at the start of a datagram that are compared with the expected bytes.
pub const BEGIN_BYTES: usize = 24;
const BEGIN_WORDS: usize = BEGIN_BYTES / 4;

/// One instruction of a socket filter: the kernel's `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SocketStep {
    code: u16,
    if_true: u8,
    if_false: u8,
    operand: u32,
}

impl ExpectedSender<'_> {
    /// Attaches the filter to a socket. The kernel then drops a datagram that does not match, and
    /// closes the datagram's descriptors, during the sender's call. Without the filter, this
    /// process would close these descriptors. Such a close can take any time, because the creator
    /// of a descriptor's file can delay it.
    fn attach(&self, socket: &Descriptor) -> Result<(), Errno> {
        const SOL_SOCKET: usize = 1;
        const ATTACH_FILTER: usize = 26;
        const LOAD_LENGTH: u16 = 0x80;
        const LOAD_WORD: u16 = 0x20;
        const IS: u16 = 0x15;
        const RETURN: u16 = 0x06;
        const STEPS: usize = 2 * (BEGIN_WORDS + 1) + 2;
        let step = |code, operand| SocketStep { code, if_true: 0, if_false: 0, operand };
        let mut steps = [step(RETURN, 0); STEPS];
        let words = self.begin.as_chunks().0.iter().enumerate();
        let length = [(step(LOAD_LENGTH, 0), self.length as u32)];
        let loaded = length.into_iter().chain(
            words.map(|(n, word)| (step(LOAD_WORD, 4 * n as u32), u32::from_be_bytes(*word))),
        );
        for (n, (load, expected)) in loaded.enumerate() {
            let is_not = (STEPS - 1 - (2 * n + 2)) as u8;
            if let Some(two) = steps.get_mut(2 * n..2 * n + 2) {
                two.copy_from_slice(&[load, SocketStep { if_false: is_not, ..step(IS, expected) }]);
            }
        }
        // The step before the last one accepts the whole datagram.
        if let Some(taken) = steps.get_mut(STEPS - 2) {
            *taken = step(RETURN, u32::MAX);
        }
        // `struct sock_fprog`.
        let program = [STEPS, steps.as_ptr() as usize];
        let bytes = size_of_val(&program);
        let (fd, at) = (socket.number() as usize, program.as_ptr() as usize);
        plain(number::SETSOCKOPT, [fd, SOL_SOCKET, ATTACH_FILTER, at, bytes, 0]).map(drop)
    }
}

/// Creates a socket with this name. The kernel sends `signal` to thread `tid` for each datagram.
/// Datagrams that do not match `only` are dropped, if the kernel supports the filter.
pub fn bind(
    name: &[u8],
    only: Option<ExpectedSender<'_>>,
    tid: u32,
    signal: u64,
) -> Result<Descriptor, Errno> {
    let socket = socket()?;
    if let Some(only) = only {
        let _ = only.attach(&socket);
    }
    name_it(&socket, name, number::BIND)?;
    notify(socket.number(), tid, signal)?;
    Ok(socket)
}

/// Creates a socket whose datagrams are sent to this name.
pub fn connect(name: &[u8]) -> Result<Descriptor, Errno> {
    let socket = socket()?;
    name_it(&socket, name, number::CONNECT)?;
    Ok(socket)
}

/// Copies the next datagram without removing it from the queue. Returns the copied length.
pub fn peek(fd: i32, buffer: &mut [u8]) -> Result<usize, Errno> {
    const PEEK_DONTWAIT: usize = 2 | 0x40;
    take(fd, buffer, PEEK_DONTWAIT)
}

/// Removes the next datagram from the queue, and closes the descriptors in it.
pub fn discard(fd: i32) {
    const DONTWAIT: usize = 0x40;
    let _ = take(fd, &mut [], DONTWAIT);
}

/// Receives a datagram without accepting descriptors.
fn take(fd: i32, buffer: &mut [u8], flags: usize) -> Result<usize, Errno> {
    let part = [buffer.as_mut_ptr() as usize, buffer.len()];
    let mut message = [0_usize; 7];
    message[2] = part.as_ptr() as usize;
    message[3] = 1;
    plain(number::RECVMSG, [fd as usize, message.as_mut_ptr() as usize, flags, 0, 0, 0])
}

/// Creates two connected sockets that preserve message boundaries. Neither of them blocks.
pub fn pair() -> Result<[Descriptor; 2], Errno> {
    let mut ends = [-1_i32; 2];
    let kind = SEQPACKET | NONBLOCK | CLOEXEC;
    let at = ends.as_mut_ptr() as usize;
    plain(number::SOCKETPAIR, [usize::from(AF_UNIX), kind, 0, at, 0, 0])?;
    Ok(ends.map(|end| Descriptor(lift(end))))
}

/// Takes ownership of a descriptor that the driver has created. Returns `None` if the number is
/// negative.
pub fn made(fd: i32) -> Option<Descriptor> {
    (fd >= 0).then_some(Descriptor(fd))
}

/// Fills `bytes` with random numbers from the kernel, or fails.
pub fn random(bytes: &mut [u8]) -> Result<(), Errno> {
    const EIO: Errno = Errno(5);
    // The kernel returns small requests such as this one in full.
    let args = [bytes.as_mut_ptr() as usize, bytes.len(), 0, 0, 0, 0];
    let given = plain(number::GETRANDOM, args)?;
    if given == bytes.len() { Ok(()) } else { Err(EIO) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;

    fn name() -> [u8; 16] {
        let mut name = [0; 16];
        random(&mut name).unwrap();
        name
    }

    #[test]
    fn a_datagram_comes_with_the_way_of_its_answer() {
        let name = name();
        assert!(connect(&name).is_err(), "no socket has the name");
        let socket = bind(&name, None, sys::gettid(), sys::SIGURG).unwrap();
        assert!(
            bind(&name, None, sys::gettid(), sys::SIGURG).is_err(),
            "another socket has the name"
        );
        let [own, theirs] = pair().unwrap();
        let to = connect(&name).unwrap();
        assert_eq!(sys::send(to.number(), b"hello", Some(theirs.number())), Ok(5));
        drop((to, theirs));

        let mut bytes = [0; 9];
        let (length, way) = sys::receive(socket.number(), &mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"hello");
        assert_eq!(sys::send(way.unwrap().number(), b"yes", None), Ok(3));
        assert_eq!(sys::receive(own.number(), &mut bytes).unwrap().0, 3);
        assert_eq!(
            sys::receive(own.number(), &mut bytes).unwrap().0,
            0,
            "the other end was closed"
        );
        assert_eq!(sys::receive(socket.number(), &mut bytes).err(), Some(sys::EAGAIN));
    }

    #[test]
    fn sender_without_reply_sees_the_socket_close() {
        let name = name();
        let socket = bind(&name, None, sys::gettid(), sys::SIGURG).unwrap();
        let [own, theirs] = pair().unwrap();
        let to = connect(&name).unwrap();
        sys::send(to.number(), b"hello", Some(theirs.number())).unwrap();
        drop((to, theirs));
        assert_eq!(sys::receive(own.number(), &mut [0]).err(), Some(sys::EAGAIN));
        drop(socket);
        assert_eq!(sys::receive(own.number(), &mut [0]).unwrap().0, 0);
    }

    #[test]
    fn peeked_datagram_stays_until_discarded() {
        let name = name();
        let socket = bind(&name, None, sys::gettid(), sys::SIGURG).unwrap();
        let [own, theirs] = pair().unwrap();
        let to = connect(&name).unwrap();
        sys::send(to.number(), b"hello", Some(theirs.number())).unwrap();
        drop(theirs);
        let mut bytes = [0; 9];
        assert_eq!(peek(socket.number(), &mut bytes), Ok(5));
        assert_eq!(&bytes[..5], b"hello");
        assert_eq!(sys::receive(own.number(), &mut [0]).err(), Some(sys::EAGAIN), "still there");
        discard(socket.number());
        assert_eq!(sys::receive(own.number(), &mut [0]).unwrap().0, 0, "closed");
        assert_eq!(peek(socket.number(), &mut bytes).err(), Some(sys::EAGAIN));
    }

    /// If a datagram does not match the filter, the kernel must drop it and close its descriptors
    /// during the sender's call. Otherwise the receiver would have to close the descriptors, and
    /// the creator of a descriptor's file can delay such a close for any time.
    #[test]
    fn unexpected_datagram_is_dropped_in_its_sender() {
        let (name, begin) = (name(), core::array::from_fn(|n| n as u8 + 1));
        let only = ExpectedSender { begin: &begin, length: 30 };
        let socket = bind(&name, Some(only), sys::gettid(), sys::SIGURG).unwrap();
        let to = connect(&name).unwrap();
        let mut right = [0; 30];
        right[..BEGIN_BYTES].copy_from_slice(&begin);
        let wrong = (0..BEGIN_BYTES).map(|n| {
            let mut wrong = right;
            wrong[n] ^= 1;
            wrong
        });
        let mut bytes = [0; 40];
        for wrong in wrong.map(Vec::from).chain([vec![], right[..29].into(), vec![1; 31]]) {
            let [own, theirs] = pair().unwrap();
            assert_eq!(sys::send(to.number(), &wrong, Some(theirs.number())), Ok(wrong.len()));
            drop(theirs);
            assert_eq!(peek(socket.number(), &mut bytes).err(), Some(sys::EAGAIN), "{wrong:?}");
            assert_eq!(sys::receive(own.number(), &mut [0]).unwrap().0, 0, "closed already");
        }
        assert_eq!(sys::send(to.number(), &right, None), Ok(30));
        assert_eq!(peek(socket.number(), &mut bytes), Ok(30));
    }

    #[test]
    fn long_names_are_refused() {
        assert!(Address::of(&[b'x'; 107]).is_some() && Address::of(&[b'x'; 108]).is_none());
        assert_ne!(name(), name());
    }
}
