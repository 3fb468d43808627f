//! The UUID of a GPU: 16 bytes in the protocol, text in NVML.

/// Formats a UUID as NVML does.
pub(super) fn nvml_uuid(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let [a, b, c, d, e] = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// The 16 bytes of a UUID that NVML writes as `GPU-` and hexadecimal digits.
pub(super) fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.strip_prefix("GPU-")?.split('-').collect();
    let whole = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    whole.then(|| u128::from_str_radix(&digits, 16).ok()).flatten().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_of_nvml_is_read() {
        let read = uuid_bytes("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f").unwrap();
        assert_eq!(read.to_vec(), (0..16).collect::<Vec<u8>>());
        for bad in ["", "GPU-", "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-0001", "GPU-ü"] {
            assert_eq!(uuid_bytes(bad), None, "{bad}");
        }
        assert_eq!(uuid_bytes("GPU-+0010203-0405-0607-0809-0a0b0c0d0e0f"), None);
    }
}
