//! Reads query parameters of the form `name=value&…`, whose values are plain words and numbers.

/// Returns the value of a query parameter, or `None` if the query does not have it. The value is
/// not decoded, because no valid value needs escapes.
#[must_use]
pub fn value<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    query?.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

/// Returns the value of a query parameter as a whole number of at least 0, or `None` if the query
/// does not have it.
///
/// # Errors
/// The value is not a whole number of at least 0.
pub fn number(query: Option<&str>, name: &str) -> Result<Option<i64>, String> {
    let Some(given) = value(query, name) else { return Ok(None) };
    match given.parse() {
        Ok(number) if number >= 0 => Ok(Some(number)),
        _ => {
            Err(format!("{name}: expected a whole number of at least 0 (milliseconds since 1970)"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_by_their_whole_name() {
        let query = Some("watch=node&since_ms=12&x");
        assert_eq!(value(query, "watch"), Some("node"));
        assert_eq!(value(query, "atch"), None);
        assert_eq!(number(query, "since_ms"), Ok(Some(12)));
        assert_eq!(number(query, "until_ms"), Ok(None));
        for bad in ["-1", "", "1h", "1.5", "99999999999999999999"] {
            assert!(number(Some(&format!("since_ms={bad}")), "since_ms").is_err(), "{bad}");
        }
        assert_eq!(value(None, "watch"), None);
    }
}
