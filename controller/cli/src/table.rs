//! Prints tables with aligned columns on a terminal.

use std::io::{self, Write};

/// Prints rows in columns. Each column is as wide as its widest cell, and the last column has no
/// fixed width.
///
/// # Errors
/// The output cannot be written.
pub fn print(out: &mut dyn Write, header: Option<&[&str]>, rows: &[Vec<String>]) -> io::Result<()> {
    let columns = header.map_or_else(|| rows.first().map_or(0, Vec::len), <[&str]>::len);
    let width = |column: usize| {
        let title = header.map_or(0, |h| h[column].chars().count());
        rows.iter().map(|row| row[column].chars().count()).chain([title]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut line = |cells: &[String]| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(&widths) {
            text.push_str(&format!("{cell:<width$}   "));
        }
        writeln!(out, "{}", text.trim_end())
    };
    if let Some(header) = header {
        line(&header.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>())?;
    }
    rows.iter().try_for_each(|row| line(row))
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_align() {
        let mut out = Vec::new();
        let rows = [vec!["a".to_owned(), "b".to_owned()], vec!["long".to_owned(), "c".to_owned()]];
        super::print(&mut out, Some(&["X", "Y"]), &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "X      Y\na      b\nlong   c\n");
    }
}
