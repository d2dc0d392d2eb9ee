"""Problems with their own reward and data: function calls, programs, word problems, apps,
repairs, BFCL."""
