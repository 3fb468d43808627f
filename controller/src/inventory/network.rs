//! Counts the TCP connections that were accepted in the network namespace of a process. It reads
//! one small file of /proc/net, whose size does not depend on the number of connections.

use std::{fs, io, io::Read, os::unix::fs::MetadataExt};

/// Maximum number of bytes to read from the file in /proc/net, which has less than 2 KiB.
const MAX_BYTES: u64 = 16 << 10;

/// Returns the number of TCP connections that were accepted in the network namespace of a process
/// since the namespace was created. Returns `None` for the host's namespace, where connections may
/// belong to any process.
///
/// # Errors
/// The process has ended, or /proc is not readable.
pub fn connections(pid: u32) -> io::Result<Option<u64>> {
    let network = |pid: &str| fs::metadata(format!("/proc/{pid}/ns/net")).map(|file| file.ino());
    if network(&pid.to_string())? == network("self")? {
        return Ok(None);
    }
    count(pid).map(Some)
}

fn count(pid: u32) -> io::Result<u64> {
    let mut text = String::new();
    fs::File::open(format!("/proc/{pid}/net/snmp"))?.take(MAX_BYTES).read_to_string(&mut text)?;
    let strange =
        || io::Error::new(io::ErrorKind::InvalidData, format!("cannot parse /proc/{pid}/net/snmp"));
    passive_opens(&text).ok_or_else(strange)
}

/// Returns the value `PassiveOpens` from the two lines that begin with `Tcp:`. The first line has
/// the names, the second line has the values.
fn passive_opens(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    pairs.find(|(name, _)| *name == "PassiveOpens")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_value_is_found_by_its_name() {
        let text =
            "Ip: Forwarding\nIp: 1\nTcp: ActiveOpens PassiveOpens\nTcp: 7 42\nUdp: A\nUdp: 1\n";
        assert_eq!(passive_opens(text), Some(42));
        assert_eq!(passive_opens("Tcp: PassiveOpens\n"), None);
        assert_eq!(passive_opens(""), None);
    }

    #[test]
    fn connections_of_the_host_are_not_counted() {
        let me = std::process::id();
        let before = count(me).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _served = listener.accept().unwrap();
        assert!(count(me).unwrap() > before);
        assert_eq!(connections(me).unwrap(), None);
    }
}
