//! The few parameters that requests have: `name=value&…`, plain words and numbers.

/// The value of a parameter, if the query has it. Nothing here needs escapes: a value
/// with one is a value that nobody knows.
#[must_use]
pub fn value<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    query?.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

/// A whole number from 0.
#[must_use]
pub fn number(query: Option<&str>, name: &str) -> Option<i64> {
    value(query, name)?.parse().ok().filter(|number| *number >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_by_their_whole_name() {
        let query = Some("watch=node&since_ms=12&x");
        assert_eq!(value(query, "watch"), Some("node"));
        assert_eq!(value(query, "atch"), None);
        assert_eq!(number(query, "since_ms"), Some(12));
        assert_eq!(number(Some("since_ms=-1"), "since_ms"), None);
        assert_eq!(value(None, "watch"), None);
    }
}
