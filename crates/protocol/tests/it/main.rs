//! Golden messages: what is written and what is read, to the letter.

mod files;
