//! Writes Markdown pages: headings, lists, tables and escapes.

/// A Markdown page that is being written.
pub struct Markdown {
    text: String,
}

impl Markdown {
    /// Creates a page with its title, and the sentence that names its sources.
    pub fn page(title: &str, sources: &str) -> Self {
        Self {
            text: format!(
                "# {title}\n\nThis page is generated from {sources}. Do not edit it: change the source and run `cargo xtask docs`.\n"
            ),
        }
    }

    /// Adds a heading of the second level.
    pub fn section(&mut self, title: &str) {
        self.text += &format!("\n## {title}\n");
    }

    /// Adds a heading of the third level.
    pub fn entry(&mut self, title: &str) {
        self.text += &format!("\n### {title}\n");
    }

    /// Adds a paragraph. An empty paragraph is not added.
    pub fn paragraph(&mut self, text: &str) {
        if !text.is_empty() {
            self.text += &format!("\n{text}\n");
        }
    }

    /// Adds a list without blank lines between its items.
    pub fn list(&mut self, items: &[String]) {
        self.text.push('\n');
        for item in items {
            self.text += &format!("- {item}\n");
        }
    }

    /// Adds a block of code.
    pub fn code(&mut self, text: &str) {
        self.text += &format!("\n```\n{text}\n```\n");
    }

    /// Adds a table. A table without rows is not added.
    pub fn table<const N: usize>(&mut self, head: [&str; N], rows: &[[String; N]]) {
        if rows.is_empty() {
            return;
        }
        self.text += &format!("\n| {} |\n|{}\n", head.join(" | "), " --- |".repeat(N));
        for row in rows {
            let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
            self.text += &format!("| {} |\n", cells.join(" | "));
        }
    }

    pub fn finish(self) -> String {
        self.text
    }
}

/// Returns the text in code quotes. An empty text stays empty.
pub fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

/// Returns a list of words, each in code quotes.
pub fn codes<T: AsRef<str>>(words: &[T]) -> String {
    words.iter().map(|word| code(word.as_ref())).collect::<Vec<_>>().join(", ")
}

/// Escapes the plain text of a comment, so that Markdown shows it as it is.
pub fn plain(text: &str) -> String {
    let mut escaped = String::new();
    let mut in_code = false;
    for c in text.chars() {
        in_code ^= c == '`';
        if !in_code && matches!(c, '<' | '*' | '[') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_escape_their_separator() {
        let mut page = Markdown::page("T", "x");
        page.table(["a", "b"], &[["1|2".into(), "3".into()]]);
        assert!(page.finish().ends_with("\n| a | b |\n| --- | --- |\n| 1\\|2 | 3 |\n"));
    }

    #[test]
    fn comments_are_no_markdown() {
        assert_eq!(plain("a\n  *.toml `<b>` <c>"), "a \\*.toml `<b>` \\<c>");
    }
}
