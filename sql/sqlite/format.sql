-- Formats: which of coord's tables are here, and in which format each is.

CREATE TABLE IF NOT EXISTS coord_format (
    table_name TEXT    NOT NULL PRIMARY KEY,
    format     INTEGER NOT NULL
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_format', 1) ON CONFLICT DO NOTHING;

-- name: where
-- (schema, table) row of (the schema that has the table, '' if none; the schema where it would be made)
SELECT coalesce((SELECT schema FROM pragma_table_list WHERE schema = home COLLATE NOCASE AND name = ?2 COLLATE NOCASE), ''), home
FROM (SELECT CASE WHEN ?1 = '' THEN 'main' ELSE lower(?1) END AS home);

-- name: formats
-- () rows of (table, format)
SELECT table_name, format
FROM coord_format;
