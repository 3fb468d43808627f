//! Splits the text of a Rust file into comments, string literals and code.

/// The comments, string literals and code of a Rust file.
#[derive(Debug, Default)]
pub struct RustText {
    /// Each line of each comment, without the leading slashes.
    pub comments: Vec<String>,
    /// Contents of each string literal, as written in the file.
    pub strings: Vec<String>,
    /// The file's text without comments and contents of strings. Line breaks are kept.
    pub code: String,
}

impl RustText {
    /// Splits the text of a Rust file. Never fails: text that is not valid Rust is split in an
    /// unspecified way.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let mut parts = Self::default();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            rest = parts.take(rest, c);
        }
        parts
    }

    /// Reads one comment, literal or character from the beginning of the text, and stores it.
    /// Returns the remaining text.
    fn take<'a>(&mut self, text: &'a str, c: char) -> &'a str {
        if let Some(comment) = text.strip_prefix("//") {
            let end = comment.find('\n').unwrap_or(comment.len());
            let line = comment[..end].trim_start_matches(['/', '!']).trim();
            self.comments.push(line.to_owned());
            return &comment[end..];
        }
        if let Some(comment) = text.strip_prefix("/*") {
            let end = comment.find("*/").map_or(comment.len(), |end| end + 2);
            let lines = comment[..end].trim_end_matches("*/").lines();
            self.comments.extend(
                lines.map(|line| line.trim_start_matches([' ', '*']).trim_end().to_owned()),
            );
            self.code.extend(comment[..end].chars().filter(|c| *c == '\n'));
            return &comment[end..];
        }
        let before = self.code.chars().next_back();
        if c == 'r' && !before.is_some_and(|c| c.is_alphanumeric() && c != 'b' && c != 'c') {
            let hashes = text[1..].len() - text[1..].trim_start_matches('#').len();
            if text[1 + hashes..].starts_with('"') {
                let ending = format!("\"{}", "#".repeat(hashes));
                return self.string(&text[2 + hashes..], &ending, false);
            }
        }
        match c {
            '"' => self.string(&text[1..], "\"", true),
            '\'' => self.quote(text),
            _ => {
                self.code.push(c);
                &text[c.len_utf8()..]
            }
        }
    }

    /// Reads and stores a string literal. `text` begins after the opening quote. Returns the text
    /// after the literal's end.
    fn string<'a>(&mut self, text: &'a str, ending: &str, escapes: bool) -> &'a str {
        let mut at = 0;
        while at < text.len() && !text[at..].starts_with(ending) {
            let step = |at: usize| text[at..].chars().next().map_or(1, char::len_utf8);
            if escapes && text[at..].starts_with('\\') {
                at += 1;
            }
            if at < text.len() {
                at += step(at);
            }
        }
        self.code.push_str("\"\"");
        self.code.extend(text[..at].chars().filter(|c| *c == '\n'));
        self.strings.push(text[..at].to_owned());
        text.get(at + ending.len()..).unwrap_or_default()
    }

    /// Reads a character literal, or the quote of a lifetime. Returns the remaining text.
    fn quote<'a>(&mut self, text: &'a str) -> &'a str {
        let inside = &text[1..];
        let mut chars = inside.char_indices();
        let literal = match (chars.next(), chars.next()) {
            (Some((_, '\\')), _) => inside[2.min(inside.len())..].find('\'').map(|end| end + 4),
            (_, Some((at, '\''))) => Some(at + 2),
            _ => None,
        };
        let end = literal.filter(|end| *end <= text.len()).unwrap_or(1);
        self.code.push('\'');
        text.get(end..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_code_are_told_apart() {
        let text = "/// Doc.\nfn a<'x>() { // End.\n    let b = \"in // it \\\" too\"; /* c\n * d */\n    let e = r#\"raw \" one\"#; let f = '\"'; let g = '\\''; let h = b\"bytes\";\n}\n";
        let parts = RustText::of(text);
        assert_eq!(parts.comments, ["Doc.", "End.", "c", "d"].map(str::to_owned));
        assert_eq!(parts.strings, ["in // it \\\" too", "raw \" one", "bytes"].map(str::to_owned));
        assert!(parts.code.contains("fn a<'x>() {"), "{}", parts.code);
        assert!(!parts.code.contains("raw") && !parts.code.contains("Doc"), "{}", parts.code);
        assert_eq!(parts.code.lines().count(), text.lines().count());
    }

    #[test]
    fn broken_text_ends() {
        for text in ["\"", "r#\"", "'\\", "/*", "'", "\"\\", "//"] {
            let parts = RustText::of(text);
            assert!(parts.code.len() <= 2, "{text:?}: {parts:?}");
        }
    }
}
