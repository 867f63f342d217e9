-- Formats: which of coord's tables are here, and in which format each is.

CREATE TABLE IF NOT EXISTS coord_format (
    table_name TEXT    NOT NULL PRIMARY KEY,
    format     INTEGER NOT NULL
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_format', 1) ON CONFLICT DO NOTHING;

-- name: exists
-- (schema, table) row of (whether the table is there)
SELECT EXISTS (SELECT 1 FROM pragma_table_list WHERE ?1 IN ('', schema) AND name = ?2);

-- name: formats
-- () rows of (table, format)
SELECT table_name, format
FROM coord_format;
