namespace fedshard::cli {}
